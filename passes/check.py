"""What a graph must be after a pass, and the metadata that its new nodes get."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxc._torch_build import OpOverload, same_memory
from fxc.graph_text import print_graph
from fxc.passes.graph import Layouts, may_view, roots_written, same_layout, source
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
        results=tuple(map(_layout, _results(graph))),
        written=_written(graph),
        namespaces=frozenset({*OWN_NAMESPACES, "fxc", *(n.target.namespace for n in graph.nodes if _is_op(n))}),
    )


def complete(graph: fx.Graph, box: Range, known: Container[fx.Node], device: str | None = None) -> None:
    """Give nodes that are not `known` their layouts; with `device`, what else nodes of a whole graph have."""
    layouts = Layouts(box, device or "cpu")
    for node in graph.nodes:
        if node.op == "call_function" and node not in known:
            node.meta["layout"] = layouts.of(node)
            if device is not None:
                node.meta["val"] = layouts.value(node)
                shown = next((arg for arg in node.all_input_nodes if _shows(node, arg, layouts)), None)
                if shown is not None:
                    node.meta["base"] = shown.meta.get("base", shown)


def _shows(node: fx.Node, source: fx.Node, layouts: Layouts) -> bool:
    return may_view(node) and same_memory(layouts.value(node), layouts.value(source))


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
        have = _layout(node)
        if have != layout and (have is None or layout is None or not same_layout(have, layout, box)):
            return f"its result {node.name} is {have}, expected {layout}"
    if (written := _written(graph)) != wanted.written:
        have, want = (", ".join(sorted(names)) or "nothing" for names in (written, wanted.written))
        return f"it writes into {have}, expected {want}"
    foreign = next((n for n in graph.nodes if _is_op(n) and n.target.namespace not in wanted.namespaces), None)
    return foreign and f"{foreign.name} calls {source(foreign)}: a pass may put in ops of aten and fxc only"


def _layout(result: Any) -> str | None:
    return result.meta.get("layout") if isinstance(result, fx.Node) else None


def _results(graph: fx.Graph) -> list[Any]:
    """Tensors, and of a whole graph numbers and None."""
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _written(graph: fx.Graph) -> frozenset[str]:
    return frozenset(node.name for node in roots_written(graph) if node.op == "placeholder")


def _is_op(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload)
