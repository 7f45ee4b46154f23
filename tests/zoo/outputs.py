"""What forward returns."""

# mypy: disable-error-code="no-any-return, operator, index, dict-item"
from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.model import Model, linear


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Several(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, torch.ops.zoo.mix(x)


class InputReturned(Model):
    """The input itself, unwritten, alone behind a cut whose result is used and one whose result is not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.ops.zoo.mix(x)
        torch.ops.zoo.mix(y)
        return x, y, x[:, :2]


class OnlyInput(Model):
    def forward(self, x: Tensor) -> Tensor:
        return x


class WeightsReturned(Model):
    """A parameter, a view of one, a buffer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("b", torch.randn(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"w": self.w, "view": self.w.t(), "b": self.b, "c": torch.tensor([1.0, 2.0]), "y": x + 1}


class Nested(Model):
    """Dict in list in tuple, None, numbers, text, an empty list, sizes."""

    def forward(self, x: Tensor) -> Any:
        n = x.shape[0]
        y = torch.ops.zoo.mix(x)
        return ([{"a": y, "none": None, 3: x * 2}, [], ()], 2.5, "text", True, n, (n * 2 + 1, float("inf")))


class Named(Model):
    def forward(self, x: Tensor) -> Any:
        y = torch.ops.zoo.mix(x)
        return {"pair": Pair(y, Pair(x + 1, None)), "shape": x.shape[0] // 2}


class Ordered(Model):
    def forward(self, x: Tensor) -> Any:
        return OrderedDict(b=torch.ops.zoo.mix(x), a=x + 1)


class Nothing(Model):
    def forward(self, x: Tensor) -> None:
        torch.ops.zoo.mix(x)


class Duplicated(Model):
    """One result three times, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.lin(torch.ops.zoo.mix(x))
        return [y, y, y.view(-1), y]


class Scalars(Model):
    """0-dimensional tensors and results that do not depend on the input."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(), torch.zeros(()), torch.ones(3), x.new_zeros(x.shape[0]), (x > 0).any()


class Layouts(Model):
    """Transposed and expanded results; strides are part of the result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.ops.zoo.mix(x)
        return y.t(), y[:1].expand(3, 8), (y + 1).t()


class OnlySize(Model):
    def forward(self, x: Tensor) -> int:
        return x.shape[0] + 1


class UnusedInput(Model):
    """An input that nothing reads, and one that is read only for its size."""

    inputs = {"x": "float32[n, 8]", "unused": "float32[m, 2]", "sized": "float32[k]"}
    dims = {"n": (1, 64), "m": (1, 9), "k": (1, 9)}
    calls = ((1, 1, 1), (5, 2, 3), (64, 9, 9))

    def forward(self, x: Tensor, unused: Tensor, sized: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        return y * sized.shape[0]
