"""Rotary embedding of keys and their way into a paged cache in one kernel, queries included."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxc._torch_build import OpOverload, has_effect
from fxc.graph_text import parse_layout
from fxc.ops import kv_write
from fxc.ops.rope import norm_rope
from fxc.ops.rope_write import norm_rope_write
from fxc.passes.base import NearMiss, New, Outcome, Pass
from fxc.passes.graph import Layouts, ancestors, is_op, last_stride, shared_root, source
from fxc.passes.quantise import CONTRACTIONS
from fxc.shapes import Range

aten = torch.ops.aten

REGROUPED = (
    aten.alias.default, aten.permute.default, aten.select.int, aten.squeeze.dim, aten.transpose.int,
    aten.unsqueeze.default, aten.view.default,
)  # fmt: skip
"""Views, never copies: contiguous before and after and as large, they leave the order of elements as it is."""


@dataclass(frozen=True)
class RopeWrite(Pass):
    """`fxc::norm_rope` of keys, and of queries with them, and `fxc::kv_write` of the turned keys.

    Runs after `norm_rope`, which makes that op of all the forms that rotary embedding and norms of heads have.
    """

    name: ClassVar[str] = "rope_write"
    fuses: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = (
        "fxc.ops.kv_write", "fxc.ops.rope", "fxc.ops.rope_kernels", "fxc.ops.rope_triton", "fxc.ops.rope_write",
    )  # fmt: skip

    def run(self, graph: fx.Graph, box: Range) -> Outcome:
        matches, near_misses = [], []
        for write in graph.find_nodes(op="call_function", target=kv_write):
            if not _may_be_turned(write.args[0]):
                continue
            found = _turned(write)
            miss = found if isinstance(found, NearMiss) else _against(graph, found)
            if miss is not None:
                near_misses.append(miss)
            else:
                matches.append(write.name)
                _replace(graph, found, Layouts(box))
        return Outcome(tuple(matches), tuple(near_misses))


@dataclass(frozen=True)
class _Site:
    """A place where turned keys are written. Nodes are `Any`, as their arguments are taken apart."""

    rope: Any
    """The call of `fxc::norm_rope`."""
    item: Any
    """Its result that is written."""
    chain: tuple[Any, ...]
    """From what is written to `item`, both included: views."""
    write: Any

    @property
    def others(self) -> list[Any]:
        """The other results that are used."""
        return [user for user in self.rope.users if user is not self.item]


def _may_be_turned(key: Any) -> bool:
    """Whether keys are computed from what `fxc::norm_rope` gives in this piece."""
    nodes = (key, *ancestors(key, CONTRACTIONS))
    return any(is_op(arg, norm_rope) for node in nodes for arg in node.all_input_nodes)


def _turned(write: Any) -> Any:
    """The site; a near miss where what is written is not all of a result of `fxc::norm_rope`, in its order."""
    key = write.args[0]
    chain = [key]
    while is_op(chain[-1], *REGROUPED):
        chain.append(chain[-1].args[0])
    item = chain[-1]
    if item.target is not operator.getitem or not is_op(item.args[0], norm_rope):
        return NearMiss(item.name, f"is {source(item)}, expected fxc::norm_rope")
    _, sizes, _ = parse_layout(item.meta["layout"])
    _, seen, strides = parse_layout(key.meta["layout"])
    if strides is not None or seen != sizes[-3:] or any(size != "1" for size in sizes[:-3]):
        return NearMiss(key.name, f"is {key.meta['layout']}, turned keys are {item.meta['layout']}")
    return _Site(item.args[0], item, tuple(chain), write)


def _against(graph: fx.Graph, site: _Site) -> NearMiss | None:
    """What stands against one kernel in the place of the write."""
    rope, write, v = site.rope, site.write, site.write.args[1]
    if len(rope.users) < len(rope.args[0]):
        return NearMiss(write.name, "one of the turned tensors is not used")
    if last_stride(v) != "1":
        return NearMiss(v.name, f"has stride {last_stride(v)} in its last dimension, the kernel needs 1")
    again = [user for user in site.others if user.args[1] == site.item.args[1]]
    for node in site.chain:
        users = [*node.users, *(again if node is site.item else ())]
        other = next((user for user in users if user not in site.chain and user is not write), None)
        if other is not None:
            return NearMiss(node.name, f"its value is used by {other.name}, too")
    order = {node: index for index, node in enumerate(graph.nodes)}
    between = [node for node in order if order[rope] < order[node] < order[write]]
    effect = next((n for n in between if isinstance(n.target, OpOverload) and has_effect(n.target)), None)
    if effect is not None:
        return NearMiss(effect.name, f"writes between the rotation and {write.name}")
    later = _later(graph, site)
    needed = next((node for node in write.all_input_nodes if node in later and node not in site.chain), None)
    if needed is not None:
        return NearMiss(needed.name, "is computed from what is turned, too")
    caches = {shared_root(node) for node in write.args[2:4]}
    reads = next((n for n in (rope, *later) for arg in n.all_input_nodes if shared_root(arg) in caches), None)
    return None if reads is None else NearMiss(reads.name, f"reads a cache before {write.name} writes into it")


def _later(graph: fx.Graph, site: _Site) -> list[Any]:
    """What depends on the turned tensors and stands before the write, in order."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    found: set[fx.Node] = set()
    waiting = [*site.rope.users]
    while waiting:
        node = waiting.pop()
        if node not in found and order[node] < order[site.write]:
            found.add(node)
            waiting += node.users
    return sorted(found, key=order.__getitem__)


def _replace(graph: fx.Graph, site: _Site, layouts: Layouts) -> None:
    """Put one call in the place of the write, and what needs its results behind it."""
    kept = [node for node in _later(graph, site) if node not in site.chain and node not in site.others]
    x, weights, *tables = site.rope.args
    queries = [index for index in range(len(x)) if index != site.item.args[1]]
    order = [*queries, site.item.args[1]]
    _, v, *caches = site.write.args
    new = New(graph, site.write, layouts)
    made = new.call(
        norm_rope_write, [x[index] for index in order], v, [weights[index] for index in order if weights], *tables,
        *caches, **site.rope.kwargs,
    )  # fmt: skip
    for other in site.others:
        other.replace_all_uses_with(new.call(operator.getitem, made, queries.index(other.args[1])))
    for node in kept:
        site.write.prepend(node)
    for node in (site.write, *site.chain, *site.others, site.rope):
        graph.erase_node(node)
