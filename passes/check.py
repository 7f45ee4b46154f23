"""What a graph must be after a pass, and the metadata that its new nodes get."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxc._torch_build import OpOverload
from fxc.graph_text import print_graph
from fxc.passes.graph import Layouts, roots_written, same_layout, source
from fxc.region import OWN_NAMESPACES
from fxc.shapes import Range


@dataclass(frozen=True)
class Contract:
    """What no pass may change."""

    inputs: tuple[tuple[str, str], ...]
    """Names and layouts."""
    results: tuple[str | None, ...]
    """Layouts."""
    written: frozenset[str]
    """Inputs that are written into."""
    namespaces: frozenset[str]
    """Of the ops that may occur."""


def contract(graph: fx.Graph) -> Contract:
    """That of a piece before the first pass."""
    return Contract(
        inputs=tuple((node.name, node.meta["layout"]) for node in graph.find_nodes(op="placeholder")),
        results=tuple(node.meta["layout"] for node in _results(graph)),
        written=_written(graph),
        namespaces=frozenset({*OWN_NAMESPACES, "fxc", *(n.target.namespace for n in graph.nodes if _is_op(n))}),
    )


def complete(graph: fx.Graph, box: Range) -> None:
    """Give new nodes their layouts."""
    layouts = Layouts(box)
    for node in graph.nodes:
        if node.op == "call_function" and "layout" not in node.meta:
            node.meta["layout"] = layouts.of(node)


def fault(graph: fx.Graph, wanted: Contract, box: Range) -> str | None:
    """What is wrong with a graph; None for a valid one."""
    try:
        graph.lint()
        print_graph(graph, "piece")
    except Exception as error:  # lint raises RuntimeError and assertions, the printer what it cannot write
        return str(error).partition("\n")[0]
    if (inputs := contract(graph).inputs) != wanted.inputs:
        return f"its inputs are {', '.join(name for name, _ in inputs)}, they were {len(wanted.inputs)}"
    results = _results(graph)
    if len(results) != len(wanted.results):
        return f"it has {len(results)} results, expected {len(wanted.results)}"
    for node, layout in zip(results, wanted.results, strict=True):
        have = node.meta["layout"]
        if have != layout and (have is None or layout is None or not same_layout(have, layout, box)):
            return f"its result {node.name} is {have}, expected {layout}"
    if (written := _written(graph)) != wanted.written:
        have, want = (", ".join(sorted(names)) or "nothing" for names in (written, wanted.written))
        return f"it writes into {have}, expected {want}"
    foreign = next((n for n in graph.nodes if _is_op(n) and n.target.namespace not in wanted.namespaces), None)
    return foreign and f"{foreign.name} calls {source(foreign)}: a pass may put in ops of aten and fxc only"


def _results(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _written(graph: fx.Graph) -> frozenset[str]:
    return frozenset(node.name for node in roots_written(graph) if node.op == "placeholder")


def _is_op(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload)
