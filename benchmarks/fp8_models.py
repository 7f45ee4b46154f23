"""FP8Llama in the variants that `fp8_step.py` compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from fp8_llama import LARGEST, FP8Linear, FP8Llama
from tiny_llama import MLP, RMSNorm


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


_inputs: dict[tuple[int, torch.Size], Tensor] = {}


def ready(x: Tensor, scale: Tensor) -> Tensor:
    """`quantise` of the first `x` that came with this scale, as if quantising took no time. Other values would not do:
    the power that a matrix product takes, and with it its time, depends on them."""
    key = scale.data_ptr(), x.shape
    if key not in _inputs:
        _inputs[key] = quantise(x, scale)
    return _inputs[key]


_library = torch.library.Library("fp8_step", "DEF")
for _schema, _function in (
    ("norm(Tensor x, Tensor weight, float eps) -> Tensor", norm),
    ("gated(Tensor x) -> Tensor", gated),
    ("quantise(Tensor x, Tensor scale) -> Tensor", quantise),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _name = _schema.partition("(")[0]
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, torch.compile(_function, dynamic=False), "CUDA")
    _library.impl(_name, _function, "Meta")
_library.define("ready(Tensor x, Tensor scale) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("ready", ready, "CPU")
_library.impl("ready", ready, "CUDA")
_library.impl("ready", lambda x, scale: x.new_empty(x.shape, dtype=torch.float8_e4m3fn), "Meta")


class ApartNorm(RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        return torch.ops.fp8_step.norm(x, self.weight, self.eps), x


class ApartMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.ops.fp8_step.gated(self.gate_up(x)))
        return out


class ApartLinear(FP8Linear):
    def forward(self, x: Tensor) -> Tensor:
        return multiplied(self, torch.ops.fp8_step.quantise(x, self.input_scale), x.dtype)


class BoundLinear(FP8Linear):
    """Multiplies what is there in FP8, whatever its input is now."""

    def forward(self, x: Tensor) -> Tensor:
        return multiplied(self, torch.ops.fp8_step.ready(x, self.input_scale), x.dtype)


def multiplied(linear: FP8Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(
        x, linear.weight.t(), scale_a=linear.input_scale, scale_b=linear.weight_scale, out_dtype=dtype
    )


def changed(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> nn.Module:
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
    return model


def apart(**shape: Any) -> nn.Module:
    """Norms, activations and quantisations are kernels of their own, which no compiler sees inside."""
    return changed(FP8Llama(**shape), {RMSNorm: ApartNorm, MLP: ApartMLP, FP8Linear: ApartLinear})


def bound(**shape: Any) -> nn.Module:
    """Without quantisation."""
    return changed(FP8Llama(**shape), {FP8Linear: BoundLinear})
