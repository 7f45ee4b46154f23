"""A graph to pieces: cut at the splitting ops, make each piece self-contained, give equal pieces one text. Pure.

What crosses a border is tensors alone. Size numbers are computed again inside each piece from a tensor that has that
size; where no input of the piece has it, a model input that does is passed along. A view of a tensor that is written
into is made again on the other side, so that both sides share memory with the tensor itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxc.cache import key
from fxc.errors import SpecError, TraceError
from fxc.graph_text import call_text, parse_layout, print_graph, rename, value_text
from fxc.scalars import is_scalar
from fxc.trace import Traced

_OWN_NAMESPACES = ("aten", "prims", "prim")
_COPIES = ("aten::clone", "aten::contiguous", "aten::_to_copy")


@dataclass(frozen=True)
class Piece:
    """What is compiled once for every place where it stands."""

    text: str
    """Canonical source, `def piece(in_0: ..., ...)`: the identity of the piece."""
    dims: tuple[str, ...]
    """Dynamic dimensions that the text mentions."""
    ops: int
    custom_ops: tuple[str, ...]
    """Qualified names of ops outside aten that it calls."""
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


@dataclass
class Eager:
    """An op that runs as itself, with the views of its arguments that have to be made again first."""

    node: fx.Node
    views: list[fx.Node]
    results: list[fx.Node]


@dataclass
class Partition:
    """A traced graph in pieces, in the order in which they run."""

    traced: Traced
    statements: list[Call | Eager] = field(default_factory=list)
    tail: list[fx.Node] = field(default_factory=list)
    """Views made again for the output."""

    @property
    def calls(self) -> list[Call]:
        return [statement for statement in self.statements if isinstance(statement, Call)]


def check_splitting_ops(names: Iterable[str]) -> None:
    """Every name must be a registered op.

    Raises:
        SpecError: names the op that is not.
    """
    for name in names:
        namespace, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace, None), op, None) if rest else None
        if packet is None or (overload and overload not in packet.overloads()):
            raise SpecError(
                f"partition.splitting_ops: {name!r} is no registered op",
                "write NAMESPACE::NAME or NAMESPACE::NAME.OVERLOAD; the module that registers it must be imported by the model's file",
            )


def is_splitting(node: fx.Node, names: Sequence[str]) -> bool:
    """Whether the graph is cut at this node: a listed op, or an op outside aten that writes into an argument.

    The latter since Inductor may drop a copy that such an op relies on, as it cannot see inside.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name
    if name in names or f"{name}.{target._overloadname}" in names:
        return True
    if name in _COPIES and _protects(node):
        return True
    return target.namespace not in _OWN_NAMESPACES and target._schema.is_mutable


def _protects(node: fx.Node) -> bool:
    """Whether a copy shields its value from an op, opaque to Inductor, that writes into the original or the copy."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return any(root.meta.get("written_by_custom") for root in (source, source.meta.get("base", source), node))


def partition(traced: Traced, splitting_ops: Sequence[str]) -> Partition:
    """Cut the graph. Nodes between two cuts are one piece, in their original order."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    _mark_custom_writes(nodes)
    region: dict[fx.Node, int] = {}
    eager: dict[int, fx.Node] = {}
    current = 0
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in region and region[node.args[0]] in eager:  # type: ignore[index]
            region[node] = region[node.args[0]]  # type: ignore[index]
        elif is_splitting(node, splitting_ops):
            eager[current + 1] = node
            region[node] = current + 1
            current += 2
        elif not is_scalar(node) or _reads_data(node):
            region[node] = current
    result = Partition(traced)
    members: dict[int, list[fx.Node]] = {}
    for node, index in region.items():
        members.setdefault(index, []).append(node)
    for index in sorted(members):
        if index in eager:
            views = _needed_views(eager[index].all_input_nodes, index, region)
            results = [eager[index]] if members[index] == [eager[index]] else members[index][1:]
            result.statements.append(Eager(eager[index], views, results))
        elif (call := _Region(traced, members[index], index, region).call()) is not None:
            result.statements.append(call)
    output = next(iter(reversed(traced.graph.nodes)))
    result.tail = _needed_views(output.all_input_nodes, current + 1, region)
    return result


def _mark_custom_writes(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace in _OWN_NAMESPACES:
            continue
        for position, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
                if isinstance(value, fx.Node):
                    value.meta.get("base", value).meta["written_by_custom"] = True


def _reads_data(node: fx.Node) -> bool:
    """Whether a size number is read out of a tensor's data."""
    return node.target is not torch.ops.aten.sym_size.int and any(not is_scalar(n) for n in node.all_input_nodes)


def _is_shared_view(node: fx.Node) -> bool:
    base = node.meta.get("base")
    return base is not None and bool(base.meta.get("written"))


def _needed_views(used: Iterable[fx.Node], index: int, region: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Views of written tensors among `used`, made outside region `index`, each after the views it is a view of."""
    found: list[fx.Node] = []
    for node in used:
        if _is_shared_view(node) and region.get(node) != index and node not in found:
            found += [view for view in _needed_views(node.all_input_nodes, index, region) if view not in found]
            found.append(node)
    return found


class _Region:
    """Builds one piece out of the nodes of a region."""

    def __init__(self, traced: Traced, members: list[fx.Node], index: int, region: Mapping[fx.Node, int]) -> None:
        used = [arg for node in members for arg in node.all_input_nodes]
        self.traced = traced
        self.region = region
        self.index = index
        views = _needed_views(used, index, region)
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
        for node in self.inputs:
            self._check_border(node)
            self.copies[node] = self.graph.placeholder(node.name)
            self.copies[node].meta["layout"] = node.meta["layout"]
        for node in body:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._copy)
            new = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            new.meta["layout"] = node.meta.get("layout")
            self.copies[node] = new
        for node in results:
            self._check_border(node)
        self.graph.output(tuple(self.copies[node] for node in results))
        rename(self.graph)
        return Call(self._piece(body), self.inputs, results)

    def _leaves(self, node: fx.Node) -> bool:
        """Whether a tensor is used outside, other than by views that are made again there."""
        if node.meta.get("layout") is None or (_is_shared_view(node) and self.region.get(node) != self.index):
            return False
        outside = [user for user in node.users if user not in self.local and not is_scalar(user)]
        if _is_shared_view(node):
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
        waiting += [n for n in self.members if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]
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
        """Dimensions in the layouts of inputs that no input has as a size by itself: `batch*seq` alone gives neither."""
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
        if _reads_data(node):
            raise TraceError(
                f"{node.name}, a number read out of a tensor, is used on both sides of a splitting op",
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
        known = {name for name, _, _ in self.traced.range.bounds} | {"Max", "Min", "Mod"}
        odd = _words(node.meta["layout"].split("[", 1)[1].replace("strides", "")) - known
        if odd:
            raise TraceError(
                f"{node.name} has a size that depends on data ({node.meta['layout']}) and crosses a splitting op",
                "keep data-dependent shapes between two splitting ops",
            )

    def _piece(self, body: list[fx.Node]) -> Piece:
        text = print_graph(self.graph, "piece")
        overloads = [node.target for node in body if isinstance(node.target, torch._ops.OpOverload)]
        custom = sorted({o._schema.name for o in overloads if o.namespace not in _OWN_NAMESPACES})
        words = _words(text)
        return Piece(
            text=text,
            dims=tuple(name for name, low, high in self.traced.range.bounds if name in words and low < high),
            ops=len(body),
            custom_ops=tuple(custom),
            random=any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads),
            values=tuple(node.meta.get("values") for node in self.inputs),
        )


def _words(text: str) -> set[str]:
    words, word = set(), ""
    for character in text + " ":
        if character.isalnum() or character == "_":
            word += character
        else:
            if word and not word[0].isdigit():
                words.add(word)
            word = ""
    return words


def _find_size(nodes: Iterable[fx.Node], expr: str) -> tuple[fx.Node, int] | None:
    """The first tensor that has `expr` as a size, and the position."""
    for node in nodes:
        sizes = parse_layout(node.meta["layout"])[1]
        if expr in sizes and not expr.isdigit():
            return node, sizes.index(expr)
    return None


def eager_text(node: fx.Node, target: str | None = None) -> str:
    """The right-hand side of an op that runs as itself; size numbers written as expressions of dimensions."""

    def written(value: Any) -> Any:
        return _Source(scalar_text(value)) if isinstance(value, fx.Node) and is_scalar(value) else value

    args = torch.fx.node.map_arg(node.args, written)
    kwargs = torch.fx.node.map_arg(node.kwargs, written)
    if node.target is operator.getitem:
        return call_text(node)
    parts = [_text(arg) for arg in args] + [f"{name}={_text(value)}" for name, value in kwargs.items()]
    return f"{target}({', '.join(parts)})"


class _Source(str):
    """Source that is put in as it stands."""


def _text(value: Any) -> str:
    if isinstance(value, _Source):
        return str(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, _Source) for item in value):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return value_text(value)


def scalar_text(node: fx.Node) -> str:
    """A size number as Python over the names of dimensions."""
    value = node.meta.get("val")
    if isinstance(value, (int, float, bool)):
        return repr(value)
    return str(node.meta["expr"])
