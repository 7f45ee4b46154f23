"""What goes wrong with captured graphs if nobody takes care: models for tests/gpu/test_faults.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Scaled(nn.Module):
    """One scale for the whole batch, as quantisation has: a NaN in any row is one in all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x / x.abs().amax().clamp(min=1.0))


class Wide(nn.Module):
    """A product that cuBLAS splits along its long inner dimension, over a workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16384), nn.Linear(16384, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.rand_like(x)


def _largest(x: Tensor) -> Tensor:
    return x / max(1.0, x.abs().max().item())  # waits for the GPU


library = torch.library.Library("faults", "DEF")
library.define("largest(Tensor x) -> Tensor")
library.impl("largest", _largest, "CompositeExplicitAutograd")
library.impl("largest", lambda x: torch.empty_like(x), "Meta")


class Waiting(nn.Module):
    """An op that no graph can hold, between pieces that one can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        middle: Tensor = torch.ops.faults.largest(self.first(x).relu())
        return self.second(middle + 1)


class Counting(nn.Module):
    """Writes into a buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls.add_(1)
        return x + self.calls
