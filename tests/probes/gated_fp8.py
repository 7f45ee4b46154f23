"""Five gated activations that end in FP8; only the first is the plain form that a fusion may take all for.

Right: SiLU(left) * right; left * SiLU(right); the gate clamped at 2; gate and value interleaved; one scale per token,
where a token of zeros comes back as exact zeros. At most one step of FP8 from eager, nothing undefined or infinite,
large values saturated at 448 times the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

INNER, WIDTH, LARGEST = 8, 16, 448.0


def _rounded(y: Tensor, scale: Tensor) -> Tensor:
    return (y / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


class GatedVariants(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(INNER, 2 * WIDTH, bias=False)
        self.register_buffer("scale", torch.tensor(0.01))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.gate_up(x)
        left, right = h.chunk(2, -1)
        even, odd = h[:, 0::2], h[:, 1::2]
        product = silu(left) * right
        scales = (product.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-12)
        return (
            _rounded(product, self.scale),
            _rounded(left * silu(right), self.scale),
            _rounded(silu(left).clamp(max=2) * right, self.scale),
            _rounded(silu(even) * odd, self.scale),
            _rounded(product, scales),
        )


def expected(model: GatedVariants, x: Tensor) -> tuple[Tensor, ...]:
    """Without the rounding to FP8."""
    h = x @ model.gate_up.weight.T
    left, right = h[:, :WIDTH], h[:, WIDTH:]
    pairs = h.view(-1, WIDTH, 2)
    swish = left / (1 + torch.exp(-left))
    limit = LARGEST * 0.01
    return (
        (swish * right).clamp(-limit, limit),
        (left * right * right.sigmoid()).clamp(-limit, limit),
        (swish.clamp(max=2) * right).clamp(-limit, limit),
        (pairs[..., 0] * pairs[..., 0].sigmoid() * pairs[..., 1]).clamp(-limit, limit),
        swish * right,
    )


def inputs(n: int) -> dict[str, Tensor]:
    x = 6 * torch.randn(n, INNER, generator=torch.Generator().manual_seed(n))
    x[-1] = 0
    return {"x": x}
