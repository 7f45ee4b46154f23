"""A small matcher: what a subgraph looks like, from its last node upwards, and the values that it has at a place.

    mul(silu(Tensor("gate")), Tensor("up"))

A name stands for the same value wherever it occurs. Alternatives are tried in order, commutative ops both ways round.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxc._torch_build import schema
from fxc.passes.graph import arguments, source


@dataclass(frozen=True)
class Found:
    """A match."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """What the names of the pattern stand for: nodes, and constants such as an epsilon."""
    inner: tuple[fx.Node, ...] = ()
    """The nodes that the pattern describes."""

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The nodes that these are computed from."""
        inputs = dict.fromkeys(other for node in self.inner for other in node.all_input_nodes)
        return tuple(node for node in inputs if node not in self.inner)


class _Stuck:
    """Where the attempt that got furthest ended."""

    def __init__(self, root: fx.Node) -> None:
        self.node = root.name
        self._depth = -1
        self._reason = ""
        self._expected: list[str] = []

    @property
    def reason(self) -> str:
        if self._reason:
            return self._reason
        plain = [name for name in self._expected if name not in ("aten::to", "aten::type_as")]  # which may be left out
        return f"is {self._found}, expected {' or '.join(dict.fromkeys(plain or self._expected))}"

    def note(self, so_far: Found, node: Any, reason: str = "", expected: str = "") -> None:
        """`node` is one, or a constant: then the last node that matched is named. With `expected`, an op's name, all
        alternatives for one node are told."""
        name = node.name if isinstance(node, fx.Node) else so_far.inner[-1].name if so_far.inner else self.node
        if len(so_far.inner) > self._depth:
            self._depth, self._reason, self._expected, self.node = len(so_far.inner), reason, [], name
            self._found = source(node) if isinstance(node, fx.Node) else str(node)
        if expected and len(so_far.inner) == self._depth and name == self.node:
            self._expected.append(expected)


@dataclass(frozen=True)
class Pattern:
    """Base of all patterns."""

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        """All ways in which an argument can be this, given what earlier ones were."""
        raise NotImplementedError


def search(pattern: Pattern, root: fx.Node) -> tuple[Iterator[Found], _Stuck]:
    """All matches that end at `root`, which they have under that name; and, once there is none left, where the best
    attempt ended, as a node's name and a reason."""
    stuck = _Stuck(root)
    return pattern.find(root, Found({"root": root}), stuck), stuck


def _bind(name: str, value: Any, so_far: Found) -> Iterator[Found]:
    known = so_far.values.get(name)
    same = known is value or (not isinstance(value, fx.Node) and known == value)
    if known is None or same:
        yield Found({**so_far.values, name: value}, so_far.inner)


@dataclass(frozen=True)
class Tensor(Pattern):
    """Any tensor."""

    name: str

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        if isinstance(value, fx.Node) and value.meta.get("layout"):
            bound = list(_bind(self.name, value, so_far))
            if not bound:
                stuck.note(so_far, value, f"expected {so_far.values[self.name].name} here, as before")
            yield from bound
        else:
            stuck.note(so_far, value, f"expected a tensor, not {value}")


@dataclass(frozen=True)
class Constant(Pattern):
    """Any argument that is not a node, which the replacement receives."""

    name: str

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        if isinstance(value, fx.Node) or value is None:
            stuck.note(so_far, value, f"{self.name} is not a constant")
        else:
            yield from _bind(self.name, value, so_far)


@dataclass(frozen=True)
class Exactly(Pattern):
    """One constant."""

    value: Any

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        if not isinstance(value, fx.Node) and value == self.value:
            yield so_far
        else:
            stuck.note(so_far, value, f"has {value} where {self.value} is expected")


@dataclass(frozen=True)
class Anything(Pattern):
    """An argument that does not matter."""

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        yield so_far


_CONSTANTS = (Constant, Exactly)
"""Looked at first: a reason then names the call that has them."""


@dataclass(frozen=True)
class Call(Pattern):
    """A call of an op. Arguments that are not given must have their defaults."""

    op: Any
    args: tuple[Pattern, ...]
    commutes: bool = False
    """Whether the first two arguments may be the other way round."""

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        if not isinstance(value, fx.Node) or value.target is not self.op:
            stuck.note(so_far, value, expected=str(schema(self.op).name))
            return
        given = list(arguments(value).values())
        for argument, have in [*zip(schema(self.op).arguments, given, strict=True)][len(self.args) :]:
            if have != argument.default_value:
                stuck.note(so_far, value, f"its {argument.name} is {have}")
                return
        here = Found(so_far.values, so_far.inner if value in so_far.inner else (*so_far.inner, value))
        orders = [given] + ([[given[1], given[0], *given[2:]]] if self.commutes else [])
        for order in orders:
            pairs = sorted(zip(self.args, order, strict=False), key=lambda pair: not isinstance(pair[0], _CONSTANTS))
            yield from _all(pairs, here, stuck)


@dataclass(frozen=True)
class Made(Pattern):
    """A call of an op, whatever its arguments are: the replacement reads them off the node."""

    op: Any
    name: str

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        if not isinstance(value, fx.Node) or value.target is not self.op:
            stuck.note(so_far, value, expected=str(schema(self.op).name))
            return
        for named in _bind(self.name, value, so_far):
            yield Found(named.values, (*so_far.inner, value))


@dataclass(frozen=True)
class Through(Pattern):
    """`pattern`, behind any number of calls of `ops`, which only move the elements of their first argument."""

    ops: tuple[Any, ...]
    pattern: Pattern
    name: str
    """Stands for these calls, the last one first."""

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        yield from self.pattern.find(value, so_far, stuck)
        if isinstance(value, fx.Node) and value.target in self.ops:
            moves = (*so_far.values.get(self.name, ()), value)
            here = Found({**so_far.values, self.name: moves}, (*so_far.inner, value))
            yield from self.find(value.args[0], here, stuck)


def _all(pairs: list[tuple[Pattern, Any]], so_far: Found, stuck: _Stuck) -> Iterator[Found]:
    """Ways in which all arguments fit at once."""
    if not pairs:
        yield so_far
        return
    (pattern, value), *rest = pairs
    for found in pattern.find(value, so_far, stuck):
        yield from _all(rest, found, stuck)


@dataclass(frozen=True)
class Item(Pattern):
    """One result of an op that has several."""

    pattern: Pattern
    index: int

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        if isinstance(value, fx.Node) and value.target is operator.getitem and value.args[1] == self.index:
            here = Found(so_far.values, so_far.inner if value in so_far.inner else (*so_far.inner, value))
            yield from self.pattern.find(value.args[0], here, stuck)
        else:
            is_item = isinstance(value, fx.Node) and value.target is operator.getitem
            what = f"is result {value.args[1]} of an op" if is_item else "is no result of several"
            stuck.note(so_far, value, f"{what}, expected result {self.index}")


@dataclass(frozen=True)
class Listed(Pattern):
    """A list of so many tensors."""

    patterns: tuple[Pattern, ...]

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        if isinstance(value, (list, tuple)) and len(value) == len(self.patterns):
            yield from _all([*zip(self.patterns, value, strict=True)], so_far, stuck)
        else:
            stuck.note(so_far, value, f"expected a list of {len(self.patterns)}")


@dataclass(frozen=True)
class OneOf(Pattern):
    """Alternatives, the preferred one first."""

    patterns: tuple[Pattern, ...]

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        for pattern in self.patterns:
            yield from pattern.find(value, so_far, stuck)


@dataclass(frozen=True)
class Named(Pattern):
    """A pattern whose node, or the fact that it is this alternative, the replacement wants to know."""

    pattern: Pattern
    name: str
    value: Any = None
    """What the name stands for; the node itself where it is None."""

    def find(self, value: Any, so_far: Found, stuck: _Stuck) -> Iterator[Found]:
        for named in _bind(self.name, value if self.value is None else self.value, so_far):
            yield from self.pattern.find(value, named, stuck)
