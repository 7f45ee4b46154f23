"""A snapshot is handed to an op that overwrites the original while it reads.

Inductor sees no use for the copy, drops it, and the op then reads rows that it has just written.

Right: row i of the first result is h[i] + h[i - 1] with the old rows, row 0 taking the last; the second is the same of
h / 2, its snapshot being used afterwards. A running sum is wrong; one row cannot tell.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


@torch.library.custom_op("probe::add_neighbour", mutates_args={"rows"})
def add_neighbour(old: Tensor, rows: Tensor) -> None:
    for i in range(len(rows)):
        rows[i] += old[i - 1]


@add_neighbour.register_fake
def _(old: Tensor, rows: Tensor) -> None:
    return None


class SnapshotThenWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.project(x)
        torch.ops.probe.add_neighbour(first.clone(), first)
        second = self.project(x) / 2
        snapshot = second.clone()
        torch.ops.probe.add_neighbour(snapshot, second)
        return first, second + 0 * snapshot


def expected(model: SnapshotThenWrite, x: Tensor) -> tuple[Tensor, ...]:
    h = x @ model.project.weight.T
    total = h + torch.cat([h[-1:], h[:-1]])
    return total, total / 2


def inputs(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))}
