"""What a pass is: its options, what it returns, and the fusion, a pass made of `pattern`, `check` and `replace`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from fxc.passes.graph import Layouts, behind, is_known, is_op, roots_written, same_layout, shared_root
from fxc.passes.match import Found, Pattern, search
from fxc.shapes import Range
from fxc.target import Target


@dataclass(frozen=True)
class NearMiss:
    """A node that looks like a place for the pass, and what is different there."""

    node: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What a pass did to a graph."""

    matches: tuple[str, ...] = ()
    """Names of the nodes that it replaced."""
    near_misses: tuple[NearMiss, ...] = ()

    @property
    def anchors(self) -> int:
        """Nodes that the pass looked at more closely."""
        return len(self.matches) + len(self.near_misses)


@dataclass(frozen=True)
class Pass:
    """A rewrite of one piece's graph, or of the whole one. The fields of a subclass are its options, with defaults, in
    `passes.NAME`.

    A graph is ATen as the model was traced, not functionalised, in the order in which it runs; `meta["layout"]` of a
    node is its `dtype[shape]`. Inputs and the layouts of results stay as they are. New nodes need no metadata.
    """

    enabled: bool = True
    expect: int | None = None
    """How often the pass has to match in the unique pieces of the general program, or in the whole graph; another count
    fails the build."""

    name: ClassVar[str]
    scope: ClassVar[Literal["piece", "graph"]] = "piece"
    """Whether it rewrites each piece, for each range and size, or the graph before it is cut, for all sizes at once:
    for what lies on both sides of a cut."""
    fuses: ClassVar[bool] = False
    """Whether it puts fewer kernels in place of several: people are told where it only almost found some."""
    level: ClassVar[int] = 2
    """The lowest `compile.level` at which it runs."""
    kernels: ClassVar[tuple[str, ...]] = ()
    """Modules of the ops that it puts in, with their kernels: part of its identity."""

    def runs_on(self, target: Target) -> bool:
        """Whether what it puts in can be compiled for this device."""
        return True

    def wants(self, box: Range) -> bool:
        """Whether the pass is of use for these sizes."""
        return True

    def run(self, graph: fx.Graph, box: Range) -> Outcome:
        """Rewrite `graph` in place for the sizes in `box`."""
        raise NotImplementedError


def _is_cast_of(node: fx.Node, reads: Iterable[fx.Node]) -> bool:
    """Whether it is another dtype of what a match reads: others may use it too, it costs nothing where it is used."""
    return is_op(node, torch.ops.aten.to.dtype) and node.all_input_nodes[0] in reads


class New:
    """Puts nodes into a graph at one place."""

    def __init__(self, graph: fx.Graph, before: fx.Node, layouts: Layouts) -> None:
        self.graph = graph
        self._before = before
        self._layouts = layouts
        self._made: list[fx.Node] = []

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of an op, with its layout."""
        with self.graph.inserting_before(self._before):
            node = self.graph.call_function(op, args, kwargs)
        node.meta["layout"] = self._layouts.of(node)
        self._made.append(node)
        return node

    def undo(self) -> None:
        """Remove all of them."""
        for node in reversed(self._made):
            self.graph.erase_node(node)


@dataclass(frozen=True)
class Fusion(Pass):
    """Replaces what a pattern matches by fewer nodes.

    A match may start at every anchor. Values inside it that are not among `outputs` must have no other user, and
    nothing that it reads may be written in the piece.
    """

    fuses: ClassVar[bool] = True
    pattern: ClassVar[Pattern]
    outputs: ClassVar[tuple[str, ...]] = ("root",)
    """Names in the pattern of the nodes that `replace` makes again; `root` is where the match started."""
    at: ClassVar[str] = ""
    """Name in the pattern of a node in whose place new ones are put, so that what it reads may be written into before
    and after. Without one, they are put behind all that the match reads."""

    def anchors(self, graph: fx.Graph, box: Range) -> Iterable[fx.Node]:
        """Where a match may start."""
        raise NotImplementedError

    def check(self, found: Found) -> NearMiss | None:
        """What the structure cannot say: dtypes, shapes, constants. None where the match may be replaced."""
        return None

    def replace(self, new: New, found: Found) -> Mapping[str, fx.Node]:
        """Make the new nodes.

        Returns:
            Name in `outputs` -> the node that takes its place, of the same layout.
        """
        raise NotImplementedError

    def run(self, graph: fx.Graph, box: Range) -> Outcome:
        matches, near_misses = [], []
        layouts = Layouts(box)
        for root in list(self.anchors(graph, box)):
            if not root.users:  # an earlier match took it
                continue
            name = root.name
            miss = self._try(graph, root, layouts)
            if miss is None:
                matches.append(name)
            else:
                near_misses.append(miss)
        return Outcome(tuple(matches), tuple(near_misses))

    def _try(self, graph: fx.Graph, root: fx.Node, layouts: Layouts) -> NearMiss | None:
        """Replace at an anchor, or say why not: what `check` says of the first match, else where matching got stuck."""
        reason: NearMiss | None = None
        found, stuck = search(self.pattern, root)
        for match in found:
            miss = self.check(match) or next(self._bound(graph, match, layouts.box), None)
            miss = miss or self._replace(graph, match, layouts)
            if miss is None:
                return None
            reason = reason or miss
        return reason or NearMiss(stuck.node, stuck.reason)

    def _ends(self, found: Found) -> dict[str, fx.Node]:
        return {name: found.values[name] for name in self.outputs if found.values.get(name) is not None}

    def _bound(self, graph: fx.Graph, found: Found, box: Range) -> Iterator[NearMiss]:
        """What in the rest of the graph stands against a match."""
        inner, ends = set(found.inner), self._ends(found).values()
        held, reads = found.values.get(self.at), self._moved_reads(found)
        for node in found.inner:
            other = next((user for user in node.users if user not in inner), None)
            if other is not None and node not in ends and not _is_cast_of(node, reads):
                yield NearMiss(node.name, f"its value is used by {other.name}, too")
        written = roots_written(graph)
        for node in (*found.inner, *reads):
            if shared_root(node) in written:
                yield NearMiss(node.name, f"it is written into in this {self.scope}")
            if not is_known(node, box):
                yield NearMiss(node.name, "its size depends on data")
        order = {node: index for index, node in enumerate(graph.nodes)}
        last = held or max(reads, key=order.__getitem__)
        for node in reads:
            if order[node] > order[last]:
                yield NearMiss(node.name, f"is not there yet where {last.name} stands")
        for node in ends:
            first = min((user for user in node.users if user not in inner), key=order.__getitem__, default=None)
            if first is not None and order[first] <= order[last]:
                yield NearMiss(node.name, f"{first.name} needs it before {last.name} is there")

    def _moved_reads(self, found: Found) -> tuple[fx.Node, ...]:
        """What a match reads at another place than before."""
        held = found.values.get(self.at)
        if held is None:
            return found.reads
        rest = Found(inner=tuple(node for node in found.inner if node is not held))
        return tuple(node for node in rest.reads if node is not held)

    def _replace(self, graph: fx.Graph, found: Found, layouts: Layouts) -> NearMiss | None:
        """Put new nodes in place of a match; a value of another layout than it had is none of them."""
        order = {node: index for index, node in enumerate(graph.nodes)}
        place = found.values.get(self.at) or behind(max(found.reads, key=order.__getitem__))
        new = New(graph, place, layouts)
        made = self.replace(new, found)
        inner = set(found.inner)
        for name, node in self._ends(found).items():
            if not same_layout(made[name].meta["layout"], node.meta["layout"], layouts.box):
                miss = NearMiss(node.name, f"is {node.meta['layout']}, the replacement {made[name].meta['layout']}")
                new.undo()
                return miss
        for name, node in self._ends(found).items():
            node.replace_all_uses_with(made[name], delete_user_cb=lambda user: user not in inner)
        for node in sorted(found.inner, key=order.__getitem__, reverse=True):
            if not node.users:
                graph.erase_node(node)
        return None
