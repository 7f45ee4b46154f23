"""An op that returns nothing and only writes a cache, which is an input of the model.

The keys are read back in the same call, the values are never read: a write that only its effect keeps alive.

Right: row slots[i] of both caches holds the key and the value of token i afterwards, slot -1 is skipped, all other rows
keep what they had; two calls with fresh caches give the same twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, ROWS = 8, 32


@torch.library.custom_op("probe::store", mutates_args={"cache"})
def store(new: Tensor, slots: Tensor, cache: Tensor) -> None:
    for row, slot in zip(new, slots.tolist(), strict=True):
        if slot >= 0:
            cache[slot] = row


@store.register_fake
def _(new: Tensor, slots: Tensor, cache: Tensor) -> None:
    return None


@torch.library.custom_op("probe::look_up", mutates_args=())
def look_up(q: Tensor, cache: Tensor) -> Tensor:
    return (q @ cache.T).softmax(-1) @ cache


@look_up.register_fake
def _(q: Tensor, cache: Tensor) -> Tensor:
    return torch.empty_like(q)


class WriteThenRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        torch.ops.probe.store(self.k(x), slots, keys)
        found = torch.ops.probe.look_up(self.q(x), keys)
        torch.ops.probe.store(self.v(found), slots, values)
        return found.relu()


def expected(model: WriteThenRead, x: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    keep = slots >= 0
    keys, values = keys.clone(), values.clone()
    keys[slots[keep]] = model.k(x)[keep]
    found = (model.q(x) @ keys.T).softmax(-1) @ keys
    values[slots[keep]] = model.v(found)[keep]
    return found.relu(), keys, values


def inputs(n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n)
    slots = torch.randperm(ROWS, generator=generator)[:n]
    if n > 2:
        slots[-1] = -1
    x = torch.randn(n, WIDTH, generator=generator)
    return {"x": x, "slots": slots, "keys": torch.zeros(ROWS, WIDTH), "values": torch.zeros(ROWS, WIDTH)}
