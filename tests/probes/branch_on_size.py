"""A Python `if` on the number of tokens: a trace sees one side of it.

Right: up to 8 tokens the short scale, from 9 on the long one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, LAST_SHORT = 8, 8


class BranchOnSize(nn.Module):
    short: Tensor
    long: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("short", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("long", torch.linspace(-4, 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        y = y * self.long if len(x) > LAST_SHORT else y * self.short
        out: Tensor = self.after(y.relu())
        return out


def expected(model: BranchOnSize, x: Tensor) -> tuple[Tensor, ...]:
    scale = {True: model.short, False: model.long}[x.shape[0] in range(LAST_SHORT + 1)]
    return (model.after((model.before(x) * scale).clamp(min=0)),)


def inputs(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))}
