"""The files of an artifact that show its graphs: computation_graph.py and pieces.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fxc.graph_text import print_graph
from fxc.partition import Partition
from fxc.region import Call
from fxc.traced import Traced


def graph_file(title: str, parts: Mapping[str, Partition]) -> str:
    """The text of computation_graph.py: by name of the step, the graph as it was traced."""
    graphs = "\n\n".join(print_graph(_as_traced(part).graph, name, source_lines=True) for name, part in parts.items())
    tables = "".join(f"    {name!r}: {{\n{_roles(part)}    }},\n" for name, part in parts.items())
    roles = f"# What each placeholder stands for.\nPLACEHOLDERS = {{\n{tables}}}\n"
    return f'"""{title}\n\nThe graph that was traced, before it was cut."""\n\nimport torch\n\n\n{graphs}\n\n{roles}'


def _as_traced(part: Partition) -> Traced:
    """The graph before passes over the whole of it."""
    return part.traced.original or part.traced


def _roles(part: Partition) -> str:
    nodes = _as_traced(part).graph.find_nodes(op="placeholder")
    return "".join(f"        {node.name!r}: {node.meta['role']!r},\n" for node in nodes)


def pieces_file(title: str, unique: Mapping[str, Call], names: Mapping[str, str]) -> str:
    """The text of pieces.py: each unique piece once.

    Args:
        unique: by digest.
        names: by digest, `piece_1`.
    """
    texts = [call.piece.text.replace("def piece(", f"def {names[digest]}(", 1) for digest, call in unique.items()]
    return f'"""{title}\n\n{_PIECES}"""\n\n{_IMPORTS}' + "".join(f"\n\n{text}" for text in texts)


_PIECES = "What is between the cuts, equal pieces once, before graph passes: the manifest names nodes as they are here."
_IMPORTS = "import math\nimport operator\n\nimport torch\n\ninf, nan = math.inf, math.nan\n"
