"""A cut whose result is not laid out as its fake says, and a strided tensor that crosses the cut.

The fake promises rows, the op returns columns; v is every third block of a wide projection.

Right: what `expected` computes. A piece that reads columns as rows scrambles them from two tokens on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 6


@torch.library.custom_op("probe::mix_columns", mutates_args=())
def mix_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.T).softmax(-1) @ v).T.contiguous().T


@mix_columns.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


class LayoutBroken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed = torch.ops.probe.mix_columns(q, k, v)
        out: Tensor = self.out(mixed.tanh()) + (-v.abs()).exp()
        return out


def expected(model: LayoutBroken, x: Tensor) -> tuple[Tensor, ...]:
    q, k, v = model.qkv(x).view(-1, 3, WIDTH).unbind(1)
    mixed = torch.softmax(q @ k.transpose(0, 1), 1) @ v
    return (torch.tanh(mixed) @ model.out.weight.T + model.out.bias + 1 / v.abs().exp(),)


def inputs(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))}
