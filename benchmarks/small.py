"""The program of the benchmark `call`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Small(nn.Module):
    """A program so small that its call is nearly all overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.scale + self.shift)
