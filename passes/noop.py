"""Removes ops that change nothing, at any size that the piece is for, and what is computed a second time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxc._torch_build import TO_COPY
from fxc.passes.base import NearMiss, Outcome, Pass
from fxc.passes.graph import arguments, is_op, merge_repeated, roots_written, same_layout, shared_root
from fxc.shapes import Range

aten = torch.ops.aten

VIEWS = (
    aten.alias.default, aten.contiguous.default, aten.expand.default, aten.expand_as.default, aten.flatten.using_ints,
    aten.narrow.default, aten.reshape.default, aten.reshape_as.default, aten.slice.Tensor, aten.to.dtype,
    aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten.unflatten.int, aten.view.default,
    aten.view_as.default,
)  # fmt: skip
"""Ops whose result is the tensor itself, or shows its memory, where layouts are equal: a slice of the same shape takes
everything, whatever its bounds look like."""
COPIES = (TO_COPY, aten.clone.default)


@dataclass(frozen=True)
class NoOp(Pass):
    """reshape, slice, slice_scatter, expand, clone, to and their kind; repeated ops.

    They are judged by the layouts before and after, never by their arguments: -1 is "what is left" for a reshape and
    "up to the last but one" for a slice.
    """

    name: ClassVar[str] = "noop"
    level: ClassVar[int] = 1

    def run(self, graph: fx.Graph, box: Range) -> Outcome:
        matches, near_misses = [], []
        for node in list(graph.nodes):
            source = _unchanged(node, box)
            if source is None or (_is_returned(node) and not _is_copy(node)):
                continue
            reason = _needed(graph, node, source)
            if reason is None:
                matches.append(node.name)
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            else:
                near_misses.append(NearMiss(node.name, reason))
        return Outcome((*matches, *merge_repeated(graph, box)), tuple(near_misses))


def _unchanged(node: fx.Node, box: Range) -> fx.Node | None:
    """The tensor that `node` has the values and the layout of, if there is one."""
    if is_op(node, aten.slice_scatter.default):
        source = node.args[1]
    elif is_op(node, *VIEWS, *COPIES):
        source = node.args[0]
        given = arguments(node)
        if given.get("device") is not None or given.get("layout") is not None:
            return None
    else:
        return None
    if not isinstance(source, fx.Node) or not source.meta.get("layout") or not node.meta.get("layout"):
        return None
    return source if same_layout(node.meta["layout"], source.meta["layout"], box) else None


def _is_copy(node: fx.Node) -> bool:
    return is_op(node, *COPIES, aten.slice_scatter.default) or bool(arguments(node).get("copy"))


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _needed(graph: fx.Graph, node: fx.Node, source: fx.Node) -> str | None:
    """Why the op has to stay."""
    if not _is_copy(node):
        return None
    if _is_returned(node):
        return "it is a copy, and the piece returns it"
    written = roots_written(graph)
    if shared_root(source) in written or shared_root(node) in written or node in written:
        return "it is a copy, and one of the two is written into"
    if any(shared_root(result) is node for result in next(iter(reversed(graph.nodes))).all_input_nodes):
        return "it is a copy, and the piece returns a view of it"
    return None
