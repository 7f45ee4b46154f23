"""RMSNorm in the graphs of models."""

from __future__ import annotations

import torch
from torch import fx

from fxc.passes.base import NearMiss
from fxc.passes.graph import dtype, shape
from fxc.passes.match import Anything, Call, Constant, Exactly, Found, Named, OneOf, Pattern, Tensor

aten = torch.ops.aten

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read."""


def cast(pattern: Pattern) -> Pattern:
    """With or without a change of dtype."""
    return OneOf(
        (
            Call(aten.to.dtype, (pattern, Anything())),
            Call(aten.type_as.default, (pattern, Anything())),
            pattern,
        )
    )


def product(left: Pattern, right: Pattern) -> Pattern:
    return Call(aten.mul.Tensor, (left, right), commutes=True)


def rms_norm(x: Pattern) -> Pattern:
    """RMSNorm of `x` over the last dimension, by ops or by the op.

    Names `eps`, `mean` or `over`, and maybe `weight`, and `offset` where that is added to it.
    """
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


def check(found: Found) -> NearMiss | None:
    """What the pattern cannot say of a norm of `x`."""
    values = found.values
    x: fx.Node = values["x"]
    mean, weight = values.get("mean"), values.get("weight")
    if mean is not None and dtype(mean) != torch.float32:
        return NearMiss(mean.name, "is not taken in f32, as the kernel does")
    if "over" in values and len(values["over"]) != 1:
        return NearMiss(x.name, f"the norm is over {len(values['over'])} dimensions, expected the last")
    if weight is not None and shape(weight) != shape(x)[-1:]:
        return NearMiss(weight.name, f"is {weight.meta['layout']}, expected as many weights as {x.name} is wide")
    if weight is not None and dtype(weight) not in KINDS:
        return NearMiss(weight.name, f"is {weight.meta['layout']}, which the kernel does not take")
    return None
