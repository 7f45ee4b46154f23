"""RMSNorm, maybe of a sum, and FP8 quantisation in one kernel."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxc.ops.fp8 import norm_fp8
from fxc.passes import norms, quantise
from fxc.passes.base import Fusion, NearMiss, New
from fxc.passes.graph import dtype, shape
from fxc.passes.match import Call, Found, Named, OneOf, Pattern, Tensor
from fxc.passes.norms import cast, rms_norm
from fxc.passes.quantise import KERNELS, blocked, quantised
from fxc.shapes import Range
from fxc.target import Target

aten = torch.ops.aten

X: Pattern = OneOf((Named(Call(aten.add.Tensor, (Tensor("x"), Tensor("residual"))), "sum"), Tensor("x")))


@dataclass(frozen=True)
class NormQuant(Fusion):
    """(residual +) x / rms(x) * weight, or * (1 + weight), and what follows of `quantise`."""

    name: ClassVar[str] = "norm_quant"
    kernels: ClassVar[tuple[str, ...]] = KERNELS
    outputs: ClassVar[tuple[str, ...]] = ("root", "scales", "sum")
    pattern: ClassVar[Pattern] = quantised(blocked(cast(rms_norm(X))))

    def runs_on(self, target: Target) -> bool:
        return quantise.supported(target)

    def anchors(self, graph: fx.Graph, box: Range) -> Iterable[fx.Node]:
        return quantise.casts(graph, (aten.rsqrt.default, aten.rms_norm.default))

    def check(self, found: Found) -> NearMiss | None:
        values = found.values
        x: fx.Node = values["x"]
        total = values.get("sum")
        if total is not None and (shape(total) != shape(x) or dtype(total) != dtype(x)):
            return NearMiss(total.name, f"is {total.meta['layout']}, its part {x.name} is {x.meta['layout']}")
        return quantise.check(found, ("x", "residual")) or norms.check(found)

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
