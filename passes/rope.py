"""Rotary position embedding of queries and keys, with the RMSNorm of each head before it, in one kernel."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxc.ops.rope import norm_rope
from fxc.passes import norms
from fxc.passes.base import Fusion, NearMiss, New, Outcome
from fxc.passes.graph import Layouts, behind, dtype, is_op, last_stride, merge_repeated, shape, sweep, width
from fxc.passes.match import Anything, Call, Constant, Exactly, Found, Item, Listed, Named, OneOf, Pattern, Tensor
from fxc.passes.norms import KINDS, cast, product, rms_norm
from fxc.shapes import Range

aten = torch.ops.aten

_NORMED = Named(cast(cast(rms_norm(Tensor("x")))), "norm", True)
_SWAPPED = Named(Call(aten.transpose.int, (_NORMED, Exactly(-3), Exactly(-2))), "swapped", True)
H: Pattern = OneOf((_NORMED, cast(_SWAPPED), cast(Tensor("x"))))
"""A head, normed, maybe before heads and tokens are swapped."""


def _slice(x: Pattern, start: Pattern, stop: Pattern, step: int = 1) -> Pattern:
    return Call(aten.slice.Tensor, (x, Exactly(-1), start, stop, Exactly(step)))


def _halves(h: Pattern) -> tuple[Pattern, Pattern]:
    chunks = Call(aten.chunk.default, (h, Exactly(2), Exactly(-1)))
    first = OneOf((Item(chunks, 0), _slice(h, Exactly(0), Constant("half"))))
    second = OneOf((Item(chunks, 1), _slice(h, Constant("half"), Anything())))
    return cast(first), cast(second)


def _neighbours(h: Pattern) -> tuple[Pattern, Pattern]:
    return cast(_slice(h, Exactly(0), Anything(), 2)), cast(_slice(h, Exactly(1), Anything(), 2))


def _turned(first: Pattern, second: Pattern) -> tuple[Pattern, Pattern]:
    cos, sin = cast(Tensor("cos")), cast(Tensor("sin"))
    left = Call(aten.sub.Tensor, (product(first, cos), product(second, sin)))
    return left, Call(aten.add.Tensor, (product(second, cos), product(first, sin)), commutes=True)


def _rotated(h: Pattern) -> Pattern:
    """All of `h`: halves turned and put together, all of it turned at once, or neighbours turned."""
    first, second = _halves(h)
    halves = Call(aten.cat.default, (Listed(_turned(first, second)), Exactly(-1)))
    swapped = Call(aten.cat.default, (Listed((Call(aten.neg.default, (second,)), first)), Exactly(-1)))
    cos, sin = cast(Tensor("cos")), cast(Tensor("sin"))
    even, odd = _neighbours(h)
    crossed = Call(aten.stack.default, (Listed((Call(aten.neg.default, (odd,)), even)), Exactly(-1)))
    beside = Named(Call(aten.flatten.using_ints, (crossed, Exactly(-2))), "interleaved", True)
    other = product(cast(OneOf((swapped, beside))), sin)
    whole = Call(aten.add.Tensor, (product(cast(h), cos), other), commutes=True)
    pairs = Call(aten.stack.default, (Listed(_turned(*_neighbours(h))), Exactly(-1)))
    return OneOf(
        (
            halves,
            whole,
            Named(Call(aten.flatten.using_ints, (cast(pairs), Exactly(-2))), "interleaved", True),
        )
    )


def _partly(h: Pattern) -> Pattern:
    """All of `h`, or its first entries, with the rest behind them."""
    front, rest = _slice(h, Exactly(0), Constant("rotary")), _slice(h, Constant("rotary"), Anything())
    part = Call(aten.cat.default, (Listed((cast(_rotated(cast(front))), cast(rest))), Exactly(-1)))
    return OneOf((_rotated(h), part))


@dataclass(frozen=True)
class NormRope(Fusion):
    """(RMSNorm of each head, and) rotation of queries and keys; two that read the same tables are one kernel."""

    name: ClassVar[str] = "norm_rope"
    kernels: ClassVar[tuple[str, ...]] = ("fxc.ops.rope", "fxc.ops.rope_kernels", "fxc.ops.rope_triton")
    pattern: ClassVar[Pattern] = cast(_partly(H))

    def anchors(self, graph: fx.Graph, box: Range) -> Iterable[fx.Node]:
        """Ends of what puts products together again, the last cast included; the outer ones first."""
        for node in reversed(graph.nodes):
            if _of_products(node) or (is_op(node, aten.cat.default) and _of_products(_uncast(node.all_input_nodes[0]))):
                users = [*node.users]
                single = len(users) == 1 and is_op(users[0], aten.to.dtype, aten.type_as.default)
                yield users[0] if single else node

    def check(self, found: Found) -> NearMiss | None:
        values = found.values
        root, x, cos, sin = (values[name] for name in ("root", "x", "cos", "sin"))
        sizes = shape(x)
        if "swapped" in values:
            sizes[-3:-1] = sizes[-2], sizes[-3]
        if dtype(x) not in KINDS or dtype(root) != dtype(x) or shape(root) != sizes or len(sizes) not in (3, 4):
            return NearMiss(root.name, f"is {root.meta['layout']}, {x.name} is {x.meta['layout']}")
        if last_stride(x) != "1":
            return NearMiss(x.name, f"has stride {last_stride(x)} in its last dimension, the kernel needs 1")
        if not sizes[-1].isdigit():
            return NearMiss(x.name, f"is {x.meta['layout']}, expected heads of a fixed width")
        rotary = int(values.get("rotary", sizes[-1]))
        if int(values.get("half", rotary // 2)) * 2 != rotary:
            return NearMiss(root.name, f"turns {values['half']} entries against the rest of {rotary}")
        for table in (cos, sin):
            if dtype(table) not in KINDS or width(table) not in (rotary, rotary // 2) or shape(table) != shape(cos):
                return NearMiss(table.name, f"is {table.meta['layout']}, no table for {rotary} entries")
            if shape(table)[:-1] not in (_tokens(root, -2), _tokens(root, -3)):
                return NearMiss(table.name, f"is {table.meta['layout']}, expected a row for each token, for all heads")
        if not sizes[_head_axis(found)].isdigit():
            return NearMiss(x.name, f"is {x.meta['layout']}, expected a fixed number of heads")
        return norms.check(found) if "norm" in values else None

    def replace(self, new: New, found: Found) -> Mapping[str, fx.Node]:
        values = found.values
        x, cos, sin = (values[name] for name in ("x", "cos", "sin"))
        turned = _head_axis(found) == -3
        if turned != ("swapped" in values):
            x = new.call(aten.transpose.int, x, -3, -2)
        if turned:  # [..., heads, tokens, d]
            cos, sin = (new.call(aten.transpose.int, table, -3, -2) for table in (cos, sin))
        weights = [values["weight"]] if values.get("weight") is not None else []
        options: dict[str, Any] = {}
        if "norm" in values:
            options = {"norm": True, "eps": float(values["eps"]), "offset": float(values.get("offset", 0.0))}
        made = new.call(
            norm_rope, [x], weights, cos, sin, rotary=int(values.get("rotary", width(values["x"]))),
            interleaved=bool(values.get("interleaved")), **options,
        )  # fmt: skip
        out = new.call(operator.getitem, made, 0)
        return {"root": new.call(aten.transpose.int, out, -3, -2) if turned else out}

    def run(self, graph: fx.Graph, box: Range) -> Outcome:
        outcome = super().run(graph, box)
        sweep(graph)
        merge_repeated(graph, box, (aten.transpose.int,))  # of a table, for queries and for keys
        made: list[fx.Node] = graph.find_nodes(op="call_function", target=norm_rope)
        while len(made) > 1:
            one, other, *rest = made
            joined = _same_tables(one, other) and _join(graph, one, other, Layouts(box))
            made = rest if joined else [other, *rest]
        return outcome


def _uncast(node: fx.Node) -> fx.Node:
    while is_op(node, aten.to.dtype, aten.type_as.default):
        node = node.all_input_nodes[0]
    return node


def _of_products(node: fx.Node) -> bool:
    """Whether sums of products are put together here, or a product with what was put together is added."""
    inputs = [_uncast(part) for part in node.all_input_nodes]
    if is_op(node, aten.add.Tensor):
        parts = [_uncast(part) for product in inputs for part in product.all_input_nodes]
        joined = any(is_op(part, aten.cat.default, aten.flatten.using_ints) for part in parts)
        return joined and all(is_op(part, aten.mul.Tensor) for part in inputs)
    if is_op(node, aten.flatten.using_ints):
        inputs = inputs[0].all_input_nodes if is_op(inputs[0], aten.stack.default) else []
    elif not is_op(node, aten.cat.default):
        return False
    return len(inputs) == 2 and all(is_op(part, aten.sub.Tensor, aten.add.Tensor) for part in inputs)


def _tokens(heads: fx.Node, axis: int) -> list[str]:
    """Sizes of a table but the last, where dimension `axis` has the heads."""
    sizes = shape(heads)
    sizes[axis] = "1"
    return sizes[:-1]


def _head_axis(found: Found) -> int:
    """-2 for [..., tokens, heads, d], -3 for [..., heads, tokens, d]."""
    return -2 if shape(found.values["cos"])[:-1] == _tokens(found.values["root"], -2) else -3


def _same_tables(one: fx.Node, other: fx.Node) -> bool:
    """Whether all but what is turned, and its weights, is the same."""
    same = one.args[2:] == other.args[2:] and one.kwargs == other.kwargs and bool(one.args[1]) == bool(other.args[1])
    left, right = (shape(node.args[0][0]) for node in (one, other))  # type: ignore[index, arg-type]
    return same and left[:-2] == right[:-2] and left[-1] == right[-1]


def _join(graph: fx.Graph, one: fx.Node, other: fx.Node, layouts: Layouts) -> bool:
    """One call for both, if all that is read is there before anything of it is needed."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    last = max((*one.all_input_nodes, *other.all_input_nodes), key=order.__getitem__)
    early = [user for item in one.users for user in item.users if order[user] <= order[last]]
    views = [user for user in early if user.target is aten.transpose.int]
    if early != views or any(order[user] <= order[last] for view in views for user in view.users):
        return False
    new = New(graph, behind(last), layouts)
    lists = [[*one.args[index], *other.args[index]] for index in (0, 1)]  # type: ignore[misc]
    made = new.call(norm_rope, *lists, *one.args[2:], **one.kwargs)
    turned = [new.call(operator.getitem, made, index) for index in range(2)]
    for view in reversed(views):
        turned[-1].append(view)
    for node, item in zip((one, other), turned, strict=True):
        for old in list(node.users):
            old.replace_all_uses_with(item)
            graph.erase_node(old)
        graph.erase_node(node)
    return True
