"""`fxc::norm_rope`: rotary position embedding of queries and keys, after an RMSNorm of each head where there is one.

    x [..., tokens, heads, d] each   weights [d] each, or none at all   cos, sin [..., tokens, 1, r / 2 or r]
    -> for each x, y [..., tokens, heads, d]

    h = x, or with `norm`  x / sqrt(mean(x**2) + eps) * (weight + offset) of each head
    y[first]  = h[first] * cos[first] - h[second] * sin[first]
    y[second] = h[second] * cos[second] + h[first] * sin[second]

for the pairs of the first r = `rotary` entries: i and i + r / 2, or neighbours with `interleaved`; what is behind them
stays. A table that is r / 2 wide holds one entry for each pair, one that is r wide one for each element. Computed in
float32. Passes put the op into graphs, and a build makes kernels of it: no program calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SCHEMA = (
    "norm_rope(Tensor[] x, Tensor[] weights, Tensor cos, Tensor sin, *, int rotary, bool interleaved=False, "
    "bool norm=False, float eps=0.0, float offset=0.0) -> Tensor[]"
)


def reference(
    x: Sequence[Tensor], weights: Sequence[Tensor], cos: Tensor, sin: Tensor, *, rotary: int, interleaved: bool = False,
    norm: bool = False, eps: float = 0.0, offset: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """The op in ATen ops that a compiler can trace."""
    made = []
    for index, tensor in enumerate(x):
        wide = tensor.float()
        if norm:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if norm and weights:
            wide = wide * (weights[index].float() + offset)
        turned = _rotate(wide[..., :rotary], cos.float(), sin.float(), interleaved)
        made.append(torch.cat([turned, wide[..., rotary:]], -1).to(tensor.dtype))
    return made


def _rotate(h: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    first, second = _pairs(h, interleaved)
    (cos_first, cos_second), (sin_first, sin_second) = (
        _pairs(table, interleaved) if table.shape[-1] == h.shape[-1] else (table, table) for table in (cos, sin)
    )
    parts = [first * cos_first - second * sin_first, second * cos_second + first * sin_second]
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def _pairs(h: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    half = h.shape[-1] // 2
    return (h[..., 0::2], h[..., 1::2]) if interleaved else (h[..., :half], h[..., half:])


def _fake(x: Sequence[Tensor], weights: Sequence[Tensor], cos: Tensor, sin: Tensor, **_: object) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in x]


_library = torch.library.Library("fxc", "FRAGMENT")
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _library.impl("norm_rope", reference, _key)
_library.impl("norm_rope", _fake, "Meta")  # not register_fake: see attention.py

norm_rope = torch.ops.fxc.norm_rope.default
