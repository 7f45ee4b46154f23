"""Inputs that are views: transposed (the stride grows with n), one element into its storage, repeated with stride 0.

Right: the same as of contiguous copies, in any order of calls.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class TakesViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, columns: Tensor, shifted: Tensor, repeated: Tensor) -> Tensor:
        out: Tensor = self.linear(columns) + shifted.tanh() * repeated
        return out


def expected(model: TakesViews, columns: Tensor, shifted: Tensor, repeated: Tensor) -> tuple[Tensor, ...]:
    return (columns @ model.linear.weight.T + model.linear.bias + torch.tanh(shifted) * repeated[:1],)


def inputs(n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return {
        "columns": torch.randn(WIDTH, n, generator=generator).T,
        "shifted": torch.randn(n * WIDTH + 1, generator=generator)[1:].view(n, WIDTH),
        "repeated": torch.randn(1, WIDTH, generator=generator).expand(n, WIDTH),
    }
