"""What passes ask of a graph and its nodes."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import fx

from fxc import _torch_build as private
from fxc import aliases
from fxc._torch_build import OpOverload, schema
from fxc.graph_text import layout, parse_layout
from fxc.scalars import NAMES, WORD, compute
from fxc.shapes import Range

MOST_POINTS = 4096
"""Sizes that two expressions are compared at, one by one; where there are more they count as different."""


def arguments(node: fx.Node) -> dict[str, Any]:
    """An op's arguments by name, defaults filled in; dimensions count from the end."""
    declared = schema(node.target).arguments
    given = dict(zip((argument.name for argument in declared), node.args, strict=False)) | node.kwargs
    values = {argument.name: given.get(argument.name, argument.default_value) for argument in declared}
    if node.args and isinstance(node.args[0], fx.Node) and node.args[0].meta.get("layout"):
        for name in values.keys() & {"dim", "dim0", "dim1"}:
            values[name] = _from_the_end(values[name], len(shape(node.args[0])))
    return values


def _from_the_end(dim: Any, rank: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_from_the_end(entry, rank) for entry in dim]
    return dim - rank if isinstance(dim, int) and dim >= 0 else dim


def is_op(node: Any, *ops: Any) -> bool:
    """Whether a node calls one of these ops."""
    return isinstance(node, fx.Node) and node.target in ops


def dtype(node: fx.Node) -> torch.dtype:
    return parse_layout(node.meta["layout"])[0]


def shape(node: fx.Node) -> list[str]:
    """Sizes, as expressions of dimensions."""
    return parse_layout(node.meta["layout"])[1]


def width(node: fx.Node) -> int | None:
    """The last size where it is a number; None for a tensor without dimensions."""
    sizes = shape(node)
    return int(sizes[-1]) if sizes and sizes[-1].isdigit() else None


def last_stride(node: fx.Node) -> str:
    """The step between neighbours in the last dimension."""
    strides = parse_layout(node.meta["layout"])[2]
    return strides[-1] if strides else "1"


def source(node: fx.Node) -> str:
    """`aten::mul` for a call, `an input` for a placeholder."""
    if isinstance(node.target, OpOverload):
        return str(schema(node.target).name)
    return "an input" if node.op == "placeholder" else str(getattr(node.target, "__name__", node.op))


def ancestors(node: fx.Node, stops: Iterable[Any]) -> Iterator[fx.Node]:
    """All that a node is computed from, up to calls of `stops` and of ops outside aten, these left out."""
    seen: set[fx.Node] = set()
    waiting = [*node.all_input_nodes]
    while waiting:
        found = waiting.pop()
        outside = isinstance(found.target, OpOverload) and found.target.namespace != "aten"
        if found in seen or found.target in stops or outside:
            continue
        seen.add(found)
        yield found
        waiting += found.all_input_nodes


def shared_root(node: fx.Node) -> fx.Node:
    """The first of the tensors whose memory this one may show."""
    while node.op == "call_function" and node.all_input_nodes:
        if node.target is not operator.getitem and not may_view(node):
            break
        node = node.all_input_nodes[0]
    return node


def may_view(node: fx.Node) -> bool:
    """Whether the result may show the memory of an argument."""
    return isinstance(node.target, OpOverload) and aliases.may_view(node.target)


def _roots(node: fx.Node) -> set[fx.Node]:
    """All tensors whose memory this one may show."""
    root = shared_root(node)
    while node is not root and source(node) not in aliases.VIEWS_OF_SEVERAL:
        node = node.all_input_nodes[0]
    return {root} if node is root else {root}.union(*map(_roots, node.all_input_nodes))


def roots_written(graph: fx.Graph) -> set[fx.Node]:
    """The tensors, by `shared_root`, that some op of the graph writes into."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        running = ("running_mean", "running_var") if source(node) in aliases.TRAINS else ()
        if not running and not schema(node.target).is_mutable:
            continue
        given = arguments(node)
        for argument in schema(node.target).arguments:
            if argument.name in running or (argument.alias_info is not None and argument.alias_info.is_write):
                value = given[argument.name]
                items = value if isinstance(value, (list, tuple)) else [value]
                found = found.union(*(_roots(item) for item in items if isinstance(item, fx.Node)))
    return found


def is_known(node: fx.Node, box: Range) -> bool:
    """Whether the layout of a tensor follows from the dimensions; so does that of what is none."""
    if not node.meta.get("layout"):
        return True
    _, sizes, strides = parse_layout(node.meta["layout"])
    words = {word for text in (*sizes, *(strides or ())) for word in WORD.findall(text)}
    return words <= {*NAMES, *(name for name, _, _ in box.bounds)}


def same_layout(one: str, other: str, box: Range) -> bool:
    """Whether two layouts are the same at every point of `box`; no element is reached by the stride of a size of 1."""
    if one == other:
        return True
    (kind, sizes, strides), (other_kind, other_sizes, other_strides) = parse_layout(one), parse_layout(other)
    if kind != other_kind or len(sizes) != len(other_sizes):
        return False
    steps, other_steps = strides or _contiguous(sizes), other_strides or _contiguous(other_sizes)
    reached = [(a, b) for size, a, b in zip(sizes, steps, other_steps, strict=True) if size != "1"]
    return all(same_size(a, b, box) for a, b in (*zip(sizes, other_sizes, strict=True), *reached))


def same_size(one: str, other: str, box: Range) -> bool:
    """Whether two sizes, expressions of dimensions, are the same at every point of `box`."""
    if one == other:
        return True
    words = {*WORD.findall(one), *WORD.findall(other)}
    axes = [[(name, value) for value in (low, high)] for name, low, high in box.bounds if name in words]
    try:
        if any(compute(one, dict(point)) != compute(other, dict(point)) for point in product(*axes)):
            return False
        axes = [[(name, v) for v in range(low, high + 1)] for name, low, high in box.bounds if name in words]
        count = 1
        for axis in axes:
            count *= len(axis)
        return count <= MOST_POINTS and all(compute(one, dict(p)) == compute(other, dict(p)) for p in product(*axes))
    except KeyError:  # depends on data
        return False


def _contiguous(sizes: list[str]) -> list[str]:
    steps, step = [], "1"
    for size in reversed(sizes):
        steps.append(step)
        step = f"({step})*({size})"
    return steps[::-1]


def behind(node: fx.Node) -> fx.Node:
    """The node before which a new one may stand that uses `node`."""
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place


def sweep(graph: fx.Graph) -> None:
    """Remove nodes without use or effect."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            if isinstance(node.target, OpOverload) and private.has_effect(node.target):
                continue
            graph.erase_node(node)


def merge_repeated(graph: fx.Graph, box: Range, ops: Container[Any] | None = None) -> list[str]:
    """Let one node stand for all that compute the same: common subexpressions. Names of those that went.

    Two results of the graph keep memory of their own, what is written into stays as often as it is there, and so does
    what draws random numbers, or is an op of which only its author knows what it does.

    Args:
        ops: those to look at; all without them.
    """
    written, seen, gone = roots_written(graph), dict[tuple[str, str, str], fx.Node](), []
    returned = {*next(iter(reversed(graph.nodes))).all_input_nodes}
    kept = returned.union(*map(_roots, returned))
    for node in list(graph.nodes):
        if (ops is not None and node.target not in ops) or not _computes_only(node, box):
            continue
        if any(_roots(each) & written for each in (node, *node.all_input_nodes)):
            continue
        first = seen.setdefault((str(node.target), repr(node.args), repr(node.kwargs)), node)
        if first is not node and not (node in kept and first in kept):
            if node in kept:
                kept.add(first)
            gone.append(node.name)
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    return gone


def _computes_only(node: fx.Node, box: Range) -> bool:
    """Whether a node does nothing but compute a value from its arguments, the same each time, in no new size."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "fxc"):
        return False
    if not node.meta.get("layout") and {*node.target.tags} & _NEW_SIZES:
        return False
    return is_known(node, box) and not private.has_effect(node.target) and not private.draws(node)


_NEW_SIZES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Layouts:
    """Layouts of new nodes, found by running their ops on tensors without memory."""

    def __init__(self, box: Range, device: str = "cpu") -> None:
        self.box = box
        self.device = device
        self._fakes: dict[fx.Node, Any] = {}

    @cached_property
    def _symbols(self) -> private.Symbols:
        """All dimensions as symbols, also those that have one value: layouts are written in their names."""
        return private.Symbols({name: (low, max(high, low + 1), high) for name, low, high in self.box.bounds})

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {str(private.expression(value)): name for name, value in self._symbols.values.items()}

    def of(self, node: fx.Node) -> str | None:
        """`f32[n, 256]`; None for what is no tensor."""
        value = self._fakes[node] = self._run(node)
        return layout(value, self._written) if isinstance(value, torch.Tensor) else None

    def value(self, node: fx.Node) -> Any:
        """What the node makes, without memory."""
        return self._value(node)

    def _written(self, size: Any) -> str:
        expr = private.expression(size)
        return str(size) if expr is None else private.render(expr, self._names)

    def _value(self, node: fx.Node) -> Any:
        if node not in self._fakes:
            known = node.meta.get("layout")
            self._fakes[node] = self._run(node) if known is None else self._fake(known)
        return self._fakes[node]

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        with self._symbols.mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _fake(self, text: str) -> torch.Tensor:
        kind, sizes, strides = parse_layout(text)
        values = self._symbols.values
        steps = None if strides is None else [compute(step, values) for step in strides]
        return self._symbols.tensor([compute(size, values) for size in sizes], steps, kind, self.device)
