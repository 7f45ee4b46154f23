"""One region of a graph, between two cuts, as a piece: self-contained, with canonical text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxc._torch_build import OpOverload, draws, has_effect, schema
from fxc.cache import key
from fxc.errors import TraceError
from fxc.graph_text import parse_layout, print_graph, rename, source_line
from fxc.scalars import NAMES, WORD, is_scalar
from fxc.traced import Traced

OWN_NAMESPACES = ("aten", "prims", "prim")
"""Ops that Inductor knows."""


@dataclass(frozen=True)
class Piece:
    """What is compiled once for every place where it stands."""

    text: str
    """Canonical source, `def piece(in_0: ..., ...)`: the identity of the piece."""
    dims: tuple[str, ...]
    """Dynamic dimensions that the text mentions."""
    ops: int
    custom_ops: tuple[str, ...]
    """Schemas of ops outside aten that it calls: `my::op(Tensor x) -> Tensor`."""
    random: bool
    """Whether it draws random numbers."""
    values: tuple[tuple[float, float] | None, ...]
    """Per input, the half-open range that made-up integers are drawn from. No part of the identity."""

    @property
    def unique(self) -> str:
        return key.digest(self.text)


@dataclass
class Call:
    """`results = piece([args])`."""

    piece: Piece
    args: list[fx.Node]
    results: list[fx.Node]
    into: bool = False
    """The step makes the result, which is also the last argument; the piece writes into it and returns nothing."""


def reads_data(node: fx.Node) -> bool:
    """Whether a size number is read out of a tensor's data."""
    return node.target is not torch.ops.aten.sym_size.int and any(not is_scalar(n) for n in node.all_input_nodes)


def is_shared_view(node: fx.Node) -> bool:
    base = node.meta.get("base")
    return base is not None and bool(base.meta.get("written"))


def needed_views(used: Iterable[fx.Node], index: int, region: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Views of written tensors among `used`, made outside region `index`, each after the views it is a view of."""
    found: list[fx.Node] = []
    for node in used:
        if is_shared_view(node) and region.get(node) != index and node not in found:
            found += [view for view in needed_views(node.all_input_nodes, index, region) if view not in found]
            found.append(node)
    return found


class Region:
    """Builds one piece out of the nodes of a region."""

    def __init__(
        self, traced: Traced, members: list[fx.Node], index: int, region: Mapping[fx.Node, int],
        out: OpOverload | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            out: of a region of one op, the overload that writes its result into an argument `out`.
        """
        used = [arg for node in members for arg in node.all_input_nodes]
        self.traced = traced
        self.region = region
        self.index = index
        self.out = out
        views = needed_views(used, index, region)
        self.members = [*views, *members]
        self.local = set(self.members)
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}
        self.inputs: list[fx.Node] = []

    def call(self) -> Call | None:
        """The piece and its call; None where nothing leaves the region."""
        results = [node for node in self.members if self._leaves(node)]
        needed = self._needed(results)
        if not needed:
            return None
        body = [node for node in self.members if node in needed]
        for node in body:
            for arg in node.all_input_nodes:
                if arg not in self.local and not is_scalar(arg) and arg not in self.inputs:
                    self.inputs.append(arg)
        for carrier in self._carriers(body):
            self.inputs.append(carrier)
        if self.out is not None:
            self.inputs += results
        for node in self.inputs:
            self._check_border(node)
            self.copies[node] = self.graph.placeholder(node.name)
            self.copies[node].meta["layout"] = node.meta["layout"]
        for node in body if self.out is None else ():
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._copy)
            new = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            new.meta["layout"] = node.meta.get("layout")
            self.copies[node] = new
        for node in results:
            self._check_border(node)
        if self.out is not None:
            self._write_into(self.out, *results)
        self.graph.output(() if self.out else tuple(self.copies[node] for node in results))
        rename(self.graph)
        return Call(self._piece(body), self.inputs, results, into=self.out is not None)

    def _write_into(self, out: OpOverload, node: fx.Node) -> None:
        """In place of `node`, an op that writes its value into the placeholder which stands for it."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._copy)
        self.graph.call_function(out, args, {**kwargs, "out": self.copies[node]})

    def _leaves(self, node: fx.Node) -> bool:
        """Whether a tensor is used outside, other than by views that are made again there."""
        if node.meta.get("layout") is None or (is_shared_view(node) and self.region.get(node) != self.index):
            return False
        outside = [user for user in node.users if user not in self.local and not is_scalar(user)]
        if is_shared_view(node):
            return False
        if any(user.target is torch.ops.aten.sym_size.int for user in node.users):
            outside = [user for user in outside if user.target is not torch.ops.aten.sym_size.int]
        return bool(outside) or (bool(node.meta.get("written")) and self._viewed_outside(node))

    def _viewed_outside(self, node: fx.Node) -> bool:
        """Whether a view of `node` made in this region is used outside it."""
        views = [view for view in self.local if view.meta.get("base") is node]
        return any(user not in self.local and not is_scalar(user) for view in views for user in view.users)

    def _needed(self, results: list[fx.Node]) -> set[fx.Node]:
        """Results, writes, and all that they use."""
        waiting = [*results]
        waiting += [n for n in self.members if isinstance(n.target, OpOverload) and has_effect(n.target)]
        needed: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            if node in self.local:
                needed.add(node)
            if node in self.local or is_scalar(node):
                waiting += [n for n in node.all_input_nodes if n in self.local or is_scalar(n)]
        return needed

    def _sizes_used(self, body: list[fx.Node]) -> list[str]:
        """Expressions of the sizes that the scalar nodes used in `body` start from, in order."""
        found: list[str] = []

        def visit(node: fx.Node) -> None:
            if node.target is torch.ops.aten.sym_size.int:
                if node.args[0] not in self.local and node.meta["expr"] not in found:
                    found.append(node.meta["expr"])
                return
            for arg in node.all_input_nodes:
                if is_scalar(arg) and arg not in self.local:
                    visit(arg)

        for node in body:
            for arg in node.all_input_nodes:
                if is_scalar(arg) and arg not in self.local:
                    visit(arg)
        return found

    def _carriers(self, body: list[fx.Node]) -> list[fx.Node]:
        """Model inputs to pass along for the sizes that no input has."""
        carriers: list[fx.Node] = []
        wanted = self._sizes_used(body)
        wanted += [name for name in self._names_in(body) if name not in wanted]
        for expr in wanted:
            if _find_size([*self.inputs, *carriers], expr) is None:
                inputs = [n for n in self.traced.graph.nodes if n.op == "placeholder" and n.meta["role"][0] == "input"]
                found = _find_size(inputs, expr)
                if found is not None:
                    carriers.append(found[0])
        return carriers

    def _names_in(self, body: list[fx.Node]) -> list[str]:
        """Dimensions in layouts of inputs that no input has as a size by itself: `batch*seq` alone gives neither."""
        sizes = [size for node in self.inputs for size in parse_layout(node.meta["layout"])[1]]
        dims = [name for name, low, high in self.traced.range.bounds if low < high]
        words = {word for size in sizes for word in _words(size)}
        return [name for name in dims if name in words and name not in sizes]

    def _copy(self, node: fx.Node) -> Any:
        if node in self.copies:
            return self.copies[node]
        if not is_scalar(node):
            raise AssertionError(f"{node} is neither an input nor made in the region")
        self.copies[node] = self._scalar(node)
        return self.copies[node]

    def _scalar(self, node: fx.Node) -> Any:
        """Compute a size number inside the piece."""
        value = node.meta.get("val")
        if isinstance(value, (int, float, bool)):
            return value
        if reads_data(node):
            raise TraceError(
                f"{node.name}, a number read out of a tensor, is used on both sides of a splitting op: "
                f"{source_line(node)}",
                "keep data-dependent sizes between two splitting ops, or make them inputs",
            )
        expr = node.meta.get("expr", "")
        found = _find_size([n for n in self.inputs if n in self.copies], expr)
        if found is not None:
            return self.graph.call_function(torch.ops.aten.sym_size.int, (self.copies[found[0]], found[1]))
        if node.target is torch.ops.aten.sym_size.int:
            source, dim = node.args
            if source in self.copies:
                return self.graph.call_function(torch.ops.aten.sym_size.int, (self.copies[source], dim))  # type: ignore[index]
            raise TraceError(
                f"the size {expr} is used behind a splitting op where no tensor has it",
                "only sizes in the names of dims can cross a cut",
            )
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._copy)
        return self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]

    def _check_border(self, node: fx.Node) -> None:
        known = {name for name, _, _ in self.traced.range.bounds} | set(NAMES)
        if _layout_words(node) - known:
            place = source_line(node)
            raise TraceError(
                f"{node.name} has a size that depends on data ({node.meta['layout']}) and crosses a splitting op"
                + (f" at {place}" if place else ""),
                "keep data-dependent shapes between two splitting ops",
            )

    def _piece(self, body: list[fx.Node]) -> Piece:
        text = print_graph(self.graph, "piece")
        overloads = [node.target for node in self.graph.nodes if isinstance(node.target, OpOverload)]
        custom = sorted({str(schema(o)) for o in overloads if o.namespace not in OWN_NAMESPACES})
        words = set().union(*(_layout_words(node) for node in self.inputs))
        return Piece(
            text=text,
            dims=tuple(name for name, low, high in self.traced.range.bounds if name in words and low < high),
            ops=len(body),
            custom_ops=tuple(custom),
            random=any(map(draws, body)),
            values=tuple(node.meta.get("values") for node in self.inputs),
        )


def _words(text: str) -> set[str]:
    """Names in an expression, attributes left out."""
    return set(WORD.findall(text))


def _layout_words(node: fx.Node) -> set[str]:
    _, sizes, strides = parse_layout(node.meta["layout"])
    return set().union(*map(_words, [*sizes, *(strides or ())]))


def _find_size(nodes: Iterable[fx.Node], expr: str) -> tuple[fx.Node, int] | None:
    """The first tensor that has `expr` as a size, and the position."""
    for node in nodes:
        sizes = parse_layout(node.meta["layout"])[1]
        if expr in sizes and not expr.isdigit():
            return node, sizes.index(expr)
    return None
