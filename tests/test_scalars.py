"""Size numbers: the expressions that are written for them, computed."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

from fxc.scalars import compute
from tests.building import check, plan_of, program_of
from tests.zoo.model import Model


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("max(n)", 5),
        ("max(1, n)", 5),
        ("max(1, n, 7)", 7),
        ("min(n, m, 4, 3)", 2),
        ("min(n, max(1, m, 3), 9) // 2", 1),
        ("max(n, 2.5, m)", 5.0),
    ],
)
def test_max_and_min_take_any_number_of_values(text: str, value: float) -> None:
    found = compute(text, {"n": 5, "m": 2})
    assert (found, type(found)) == (value, type(value))


def test_max_and_min_of_symbols() -> None:
    n = ShapeEnv().create_unbacked_symint()
    assert str(compute("max(1, n, 7)", {"n": n}).node.expr) == f"Max(7, {n})"
    assert str(compute("min(n, 7, 3)", {"n": n}).node.expr) == f"Min(3, {n})"


class Unshuffled(Model):
    """Sizes of which torch takes the minimum of three."""

    inputs: ClassVar = {"x": "float32[3, h, w]"}
    dims: ClassVar = {"h": (2, 9), "w": (2, 9)}
    calls = ((2, 2), (3, 4), (8, 5), (9, 9))

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:]
        return torch.ops.zoo.mix(functional.pixel_unshuffle(functional.pad(x, (0, w % 2, 0, h % 2)), 2))


def test_a_model_with_a_minimum_of_three() -> None:
    check(Unshuffled, program_of(plan_of(Unshuffled)))
