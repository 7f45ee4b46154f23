"""Linear layers of a single row, as decoding one token has them, by a kernel that reads weights as fast as memory gives
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxc.ops.gemv import gemv
from fxc.passes.base import Fusion, NearMiss, New
from fxc.passes.graph import dtype, is_op, last_stride, same_size, shape
from fxc.passes.match import Call, Exactly, Found, OneOf, Pattern, Tensor
from fxc.shapes import Range
from fxc.target import Target

aten = torch.ops.aten

LEAST = 1 << 20
"""Elements of a weight from which on a kernel of its own pays: smaller ones are read in less than a launch takes."""

X, WEIGHT, BIAS = Tensor("x"), Tensor("weight"), Tensor("bias")
TURNED: Pattern = OneOf((Call(aten.t.default, (WEIGHT,)), Call(aten.transpose.int, (WEIGHT, Exactly(-2), Exactly(-1)))))


@dataclass(frozen=True)
class RowLinear(Fusion):
    """x @ weight.t() + bias, of one row x and a 16-bit weight of a million elements or more."""

    name: ClassVar[str] = "row_linear"
    kernels: ClassVar[tuple[str, ...]] = ("fxc.ops.gemv", "fxc.ops.gemv_triton", "fxc.ops.gemv_kernels")
    pattern: ClassVar[Pattern] = OneOf(
        (
            Call(aten.linear.default, (X, WEIGHT, BIAS)),
            Call(aten.linear.default, (X, WEIGHT)),
            Call(aten.mm.default, (X, TURNED)),
            Call(aten.matmul.default, (X, TURNED)),
            Call(aten.addmm.default, (BIAS, X, TURNED)),
        )
    )

    def runs_on(self, target: Target) -> bool:
        return target.device == "cuda"

    def wants(self, box: Range) -> bool:
        return any(low == high == 1 for _, low, high in box.bounds)

    def anchors(self, graph: fx.Graph, box: Range) -> Iterable[fx.Node]:
        """Products of one row and a weight that is worth it."""
        products = (aten.linear.default, aten.mm.default, aten.matmul.default, aten.addmm.default)
        return [node for node in graph.nodes if is_op(node, *products) and _worth_it(*_factors(node), box)]

    def check(self, found: Found) -> NearMiss | None:
        x, weight, bias = found.values["x"], found.values["weight"], found.values.get("bias")
        if dtype(weight) != dtype(x):
            return NearMiss(weight.name, f"is {weight.meta['layout']}, its input {x.meta['layout']}")
        if last_stride(weight) != "1" or last_stride(x) != "1":
            return NearMiss(weight.name, f"is {weight.meta['layout']}, expected rows without gaps")
        if bias is not None and shape(bias) != shape(weight)[:1]:
            return NearMiss(bias.name, f"is {bias.meta['layout']}, expected one number for each row of the weight")
        return None

    def replace(self, new: New, found: Found) -> Mapping[str, fx.Node]:
        values = found.values
        more = () if values.get("bias") is None else (values["bias"],)
        return {"root": new.call(gemv, values["x"], values["weight"], *more)}


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What a product multiplies, and by what."""
    x, weight = node.args[1:3] if is_op(node, aten.addmm.default) else node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    return x, weight


def _worth_it(x: fx.Node, weight: fx.Node, box: Range) -> bool:
    sizes = shape(weight)
    known = len(sizes) == 2 and all(size.isdigit() for size in sizes)
    large = known and dtype(weight) in (torch.bfloat16, torch.float16) and int(sizes[0]) * int(sizes[1]) >= LEAST
    return large and all(same_size(size, "1", box) for size in shape(x)[:-1])
