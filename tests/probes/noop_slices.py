"""Slices that look as if they did nothing.

For reshape -1 means "whatever is left", for a slice it means "up to the last but one": a rewrite that treats both alike
drops a slice that shortens.

Right: the first and third results are 11 wide, the second is five times the projection, the last sums all rows but one
and is zero for a single row. One row is promised, so it must be served.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 12


class NoopSlices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.project(x)
        nothing = (y[:, :WIDTH], y.view(-1, WIDTH), y[:, -WIDTH:], y[:, ::1], y[:, :1000])
        return 2 * y[:, :-1], torch.stack(nothing).sum(0), y[:, 1:], y[:-1].sum(0)


def expected(model: NoopSlices, x: Tensor) -> tuple[Tensor, ...]:
    y = x @ model.project.weight.T
    columns = [y[:, i] for i in range(WIDTH)]
    rows = sum((y[i] for i in range(len(x) - 1)), torch.zeros(WIDTH))
    return 2 * torch.stack(columns[:11], 1), 5 * y, torch.stack(columns[1:], 1), rows


def inputs(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))}
