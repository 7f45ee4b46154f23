"""What warm makes up: points, inputs, weights. Its verb is tested in tests/cli."""

from __future__ import annotations

import pytest
import torch

from fxc.manifest import Input, Weight
from fxc.ready import make_input, make_weight, point_for
from fxc.shapes import Range, size_range


def box(low: int, high: int) -> Range:
    return Range((("n", low, high),))


@pytest.mark.parametrize(
    ("served", "sizes", "point"),
    [
        (box(8, 8), [8], 8),
        (box(1, 64), [], 1),
        (box(1, 64), [1, 2, 4], 3),
        (box(0, 64), [], 1),
        (box(0, 0), [], 0),
        (box(17, 64), [64], 17),
        (box(1, 2), [1, 2], None),
    ],
)
def test_point_for(served: Range, sizes: list[int], point: int | None) -> None:
    found = point_for(served, [size_range(["n"], {"n": size}) for size in sizes])
    assert found == (None if point is None else {"n": point})


def test_point_for_two_dimensions() -> None:
    whole = Range((("b", 1, 2), ("t", 1, 100)))
    assert point_for(whole, [size_range(["b", "t"], {"b": 1, "t": 1})]) == {"b": 2, "t": 2}
    assert point_for(Range(()), []) == {}


@pytest.mark.parametrize(
    ("dtype", "values", "low", "high"),
    [
        ("int64", None, 0, 1), ("int32", (5, 8), 5, 7), ("int64", (0.5, 2.5), 1, 2), ("uint8", (3, 4), 3, 3),
        ("bool", None, 0, 1), ("float32", (2.0, 3.0), 2, 3), ("bfloat16", (-1.0, 1.0), -1, 1),
    ],
)  # fmt: skip
def test_make_input_draws_from_values(dtype: str, values: tuple[float, float] | None, low: float, high: float) -> None:
    entry = Input(name="x", shape=("n", 7), dtype=dtype, values=values)
    made = make_input(entry, {"n": 50}, torch.Generator().manual_seed(0))
    assert (made.shape, made.dtype) == ((50, 7), getattr(torch, dtype))
    assert made.double().min() >= low
    assert made.double().max() <= high
    if not made.dtype.is_floating_point:
        assert {made.long().min().item(), made.long().max().item()} == {low, high}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn", "complex64"])
def test_make_input_is_normal_by_default(dtype: str) -> None:
    made = make_input(Input(name="x", shape=(1000,), dtype=dtype), {}, torch.Generator().manual_seed(0))
    assert made.dtype == getattr(torch, dtype)
    assert 0.9 < made.to(torch.complex128).abs().square().mean() < 1.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64"])
def test_make_weight(dtype: str) -> None:
    made = make_weight(Weight(name="w", shape=(40, 50), dtype=dtype), torch.Generator().manual_seed(0))
    assert (made.shape, made.dtype) == ((40, 50), getattr(torch, dtype))
    assert 0.01 < made.to(torch.complex64).abs().square().mean().sqrt() < 0.04


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_make_weight_of_integers_is_zero(dtype: str) -> None:
    made = make_weight(Weight(name="w", shape=(3,), dtype=dtype, buffer=True), torch.Generator())
    assert made.tolist() == [0, 0, 0]
