"""A gated activation and FP8 quantisation in one kernel."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxc.ops.fp8 import ACTIVATIONS, gated_fp8
from fxc.passes import quantise
from fxc.passes.base import Fusion, NearMiss, New
from fxc.passes.match import Call, Constant, Found, Named, OneOf, Pattern, Tensor
from fxc.passes.norms import cast, product
from fxc.passes.quantise import KERNELS, blocked, quantised
from fxc.shapes import Range
from fxc.target import Target

aten = torch.ops.aten


def _gated() -> Pattern:
    gate = cast(Tensor("gate"))
    activation = OneOf(
        (
            Named(Call(aten.silu.default, (gate,)), "activation", "silu"),
            Named(product(gate, Call(aten.sigmoid.default, (gate,))), "activation", "silu"),
            Call(aten.gelu.default, (gate, Constant("approximate"))),
        )
    )
    return product(cast(activation), cast(Tensor("up")))


@dataclass(frozen=True)
class GatedQuant(Fusion):
    """SiLU or GELU (exact or by tanh) of one tensor, times another, and what follows of `quantise`."""

    name: ClassVar[str] = "gated_quant"
    kernels: ClassVar[tuple[str, ...]] = KERNELS
    outputs: ClassVar[tuple[str, ...]] = ("root", "scales")
    pattern: ClassVar[Pattern] = quantised(blocked(cast(_gated())))

    def runs_on(self, target: Target) -> bool:
        return quantise.supported(target)

    def anchors(self, graph: fx.Graph, box: Range) -> Iterable[fx.Node]:
        return quantise.casts(graph, (aten.silu.default, aten.gelu.default, aten.sigmoid.default))

    def check(self, found: Found) -> NearMiss | None:
        return quantise.check(found, ("gate", "up"))

    def replace(self, new: New, found: Found) -> Mapping[str, fx.Node]:
        values = found.values
        name = values.get("activation") or f"gelu_{values['approximate']}"
        made = new.call(
            gated_fp8, values["gate"], values["up"], values.get("scale"), activation=ACTIVATIONS.index(name),
            **quantise.options(found, values["gate"]),
        )  # fmt: skip
        items = [new.call(operator.getitem, made, index) for index in range(2)]
        return quantise.results(new, found, values["gate"], *items)
