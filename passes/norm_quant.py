"""RMSNorm, maybe of a sum, and FP8 quantisation in one kernel."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxc.ops.fp8 import norm_fp8
from fxc.passes import quantise
from fxc.passes.base import Fusion, NearMiss, New
from fxc.passes.graph import dtype, shape
from fxc.passes.match import Call, Constant, Exactly, Found, Named, OneOf, Pattern, Tensor
from fxc.passes.quantise import blocked, cast, product, quantised

aten = torch.ops.aten

X: Pattern = OneOf((Named(Call(aten.add.Tensor, (Tensor("x"), Tensor("residual"))), "sum"), Tensor("x")))


def _norm(x: Pattern) -> Pattern:
    wide = cast(x)
    square = OneOf(
        (
            Call(aten.pow.Tensor_Scalar, (wide, Exactly(2))),
            Call(aten.mul.Tensor, (wide, wide)),
            Call(aten.square.default, (wide,)),
        )
    )
    mean = Named(Call(aten.mean.dim, (square, Exactly([-1]), Exactly(True))), "mean")
    root = Call(aten.rsqrt.default, (Call(aten.add.Tensor, (mean, Constant("eps"))),))
    unit = cast(product(wide, root))
    weight = OneOf((Call(aten.add.Tensor, (cast(Tensor("weight")), Constant("offset"))), Tensor("weight")))
    return OneOf(
        (
            product(unit, cast(weight)),
            unit,
            Call(aten.rms_norm.default, (x, Constant("over"), Tensor("weight"), Constant("eps"))),
        )
    )


@dataclass(frozen=True)
class NormQuant(Fusion):
    """(residual +) x / rms(x) * weight, or * (1 + weight), and what follows of `quantise`."""

    name: ClassVar[str] = "norm_quant"
    kernels: ClassVar[tuple[str, ...]] = ("fxc.ops.fp8", "fxc.ops.fp8_triton", "fxc.ops.fp8_kernels")
    outputs: ClassVar[tuple[str, ...]] = ("root", "scales", "sum")
    pattern: ClassVar[Pattern] = quantised(blocked(cast(_norm(X))))

    def anchors(self, graph: fx.Graph) -> Iterable[fx.Node]:
        return quantise.casts(graph, (aten.rsqrt.default, aten.rms_norm.default))

    def check(self, found: Found) -> NearMiss | None:
        values = found.values
        x: fx.Node = values["x"]
        mean, weight, total = (values.get(name) for name in ("mean", "weight", "sum"))
        if total is not None and (shape(total) != shape(x) or dtype(total) != dtype(x)):
            return NearMiss(total.name, f"is {total.meta['layout']}, its part {x.name} is {x.meta['layout']}")
        if (miss := quantise.check(found, ("x", "residual"))) is not None:
            return miss
        if mean is not None and dtype(mean) != torch.float32:
            return NearMiss(mean.name, "is not taken in f32, as the kernel does")
        if "over" in values and len(values["over"]) != 1:
            return NearMiss(x.name, f"the norm is over {len(values['over'])} dimensions, expected the last")
        if weight is not None and shape(weight) != shape(x)[-1:]:
            return NearMiss(weight.name, f"is {weight.meta['layout']}, expected as many weights as {x.name} is wide")
        if weight is not None and dtype(weight) not in quantise.KINDS:
            return NearMiss(weight.name, f"is {weight.meta['layout']}, which the kernel does not take")
        return None

    def replace(self, new: New, found: Found) -> Mapping[str, fx.Node]:
        values = found.values
        x = values["x"]
        scale = values.get("scale")
        made = new.call(
            norm_fp8, x, values.get("residual"), values.get("weight"), scale, eps=float(values["eps"]),
            offset=float(values.get("offset", 0.0)), **quantise.options(found, x),
        )  # fmt: skip
        items = [new.call(operator.getitem, made, index) for index in range(3)]
        return {**quantise.results(new, found, x, *items[:2]), "sum": items[2]}
