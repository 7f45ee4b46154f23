"""`fxc::norm_fp8` and `fxc::gated_fp8`: what precedes an FP8 linear layer, and the quantisation of its input.

    norm_fp8   y = n(x + residual) * (weight + offset), with n(x) = x / sqrt(mean(x**2) + eps) over the last dimension
    gated_fp8  y = activation(gate) * up

    q = clamp(y / s, -limit, limit) in float8_e4m3fn, where s is
        scale                              given, one element; y * scale with `inverse`
        max(max |y| / divisor, floor)      of a row, or with `group` of each so many neighbours

x, residual, gate, up [..., width]   weight [width]   scale float32, one element
-> q [..., width]   scales float32 [..., 1] or [..., width / group]   x + residual [..., width], in x's dtype

Results that were not asked for (scales of a given one, a sum of one) are empty. What is not rounded to a result is
float32; kernels multiply by 1 / s. NaN stays NaN, and makes the scale that it belongs to NaN, as amax does.

Passes put these ops into graphs, and a build makes kernels of them: no program calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

_QUANTISED = "bool inverse=False, int group=0, float limit=448.0, float divisor=448.0, float floor=0.0"
NORM = (
    "norm_fp8(Tensor x, Tensor? residual, Tensor? weight, Tensor? scale, *, float eps, float offset=0.0, "
    f"{_QUANTISED}) -> (Tensor, Tensor, Tensor)"
)
GATED = f"gated_fp8(Tensor gate, Tensor up, Tensor? scale, *, int activation=0, {_QUANTISED}) -> (Tensor, Tensor)"
ACTIVATIONS = ("silu", "gelu_none", "gelu_tanh")
"""In the order of `activation`: SiLU, GELU by erf, GELU by tanh."""


def norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, scale: Tensor | None, *, eps: float, offset: float = 0.0,
    inverse: bool = False, group: int = 0, limit: float = 448.0, divisor: float = 448.0, floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`fxc::norm_fp8` in ATen ops that a compiler can trace."""
    total = x if residual is None else x + residual
    y = total.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.float() + offset)
    quantised, scales = _quantise(y, scale, inverse, group, limit, divisor, floor)
    return quantised, scales, x.new_empty(0) if residual is None else total


def gated_reference(
    gate: Tensor, up: Tensor, scale: Tensor | None, *, activation: int = 0, inverse: bool = False, group: int = 0,
    limit: float = 448.0, divisor: float = 448.0, floor: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fxc::gated_fp8`, likewise."""
    wide = gate.float()
    _, _, approximate = ACTIVATIONS[activation].partition("_")
    opened = gelu(wide, approximate=approximate) if approximate else silu(wide)
    return _quantise(opened * up.float(), scale, inverse, group, limit, divisor, floor)


def _quantise(
    y: Tensor, scale: Tensor | None, inverse: bool, group: int, limit: float, divisor: float, floor: float
) -> tuple[Tensor, Tensor]:
    if scale is not None:
        ratio = y * scale if inverse else y / scale
        return ratio.clamp(-limit, limit).to(torch.float8_e4m3fn), y.new_empty(0)
    rows = y.unflatten(-1, (-1, group)) if group else y
    scales = (rows.abs().amax(-1, keepdim=True) / divisor).clamp(min=floor)
    quantised = (rows / scales).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return (quantised.flatten(-2), scales.squeeze(-1)) if group else (quantised, scales)


def empty_scales(x: Tensor, scale: Tensor | None, group: int) -> Tensor:
    """Memory for the scales, none where one is given."""
    if scale is not None:
        return x.new_empty(0, dtype=torch.float32)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // group if group else 1), dtype=torch.float32)


def _norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, scale: Tensor | None, *, group: int = 0, **_: float
) -> tuple[Tensor, Tensor, Tensor]:
    quantised = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return quantised, empty_scales(x, scale, group), x.new_empty(0 if residual is None else x.shape)


def _gated_fake(gate: Tensor, up: Tensor, scale: Tensor | None, *, group: int = 0, **_: float) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape, dtype=torch.float8_e4m3fn), empty_scales(gate, scale, group)


_library = torch.library.Library("fxc", "FRAGMENT")
for _name, _schema, _reference, _fake in (
    ("norm_fp8", NORM, norm_reference, _norm_fake),
    ("gated_fp8", GATED, gated_reference, _gated_fake),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _reference, _key)
    _library.impl(_name, _fake, "Meta")  # not register_fake: see attention.py

norm_fp8 = torch.ops.fxc.norm_fp8.default
gated_fp8 = torch.ops.fxc.gated_fp8.default
