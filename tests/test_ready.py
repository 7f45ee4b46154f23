"""What warm makes up: points, inputs, weights. Its verb is tested in tests/cli."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from fxc import pipeline
from fxc.manifest import Input, Weight
from fxc.ready import _started, make_input, make_weight, point_for, warm
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
    assert point_for(whole, [size_range(["b", "t"], {"b": 1, "t": 1})]) == {"b": 1, "t": 2}
    assert point_for(Range(()), []) == {}


@pytest.mark.parametrize(
    ("taken", "point"),
    [
        ([], (1, 1)),
        ([(1, 1), (2, 2)], (1, 2)),
        ([(1, 1), (1, 2), (2, 2)], (2, 1)),
        ([(1, 1), (1, 2), (2, 1)], (2, 2)),
        ([(1, 1), (1, 2), (2, 1), (2, 2)], None),
    ],
)
def test_point_for_is_none_only_where_sizes_cover_all(taken: list[tuple[int, int]], point: tuple[int, int]) -> None:
    whole = Range((("b", 1, 2), ("t", 1, 2)))
    found = point_for(whole, [size_range(["b", "t"], {"b": b, "t": t}) for b, t in taken])
    assert found == (point and {"b": point[0], "t": point[1]})


def test_point_for_does_not_walk_a_large_box() -> None:
    whole = Range((("b", 1, 2**31), ("t", 0, 2**31)))
    sizes = [size_range(["b", "t"], {"b": b, "t": t}) for b in range(1, 9) for t in range(1, 9)]
    assert point_for(whole, sizes) == {"b": 1, "t": 9}


def test_processes_are_counted_once_each() -> None:
    with _started() as outer:
        subprocess.run(["true"], check=True)
        subprocess.run(["true"], check=True, close_fds=False)  # by posix_spawn
        with _started() as inner:
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        os.system("true")
    subprocess.run(["true"], check=True)
    assert outer == ["subprocess.Popen", "subprocess.Popen", "os.posix_spawn", "os.system"]
    assert inner == ["os.posix_spawn"]


OPS = """
import subprocess, torch
from torch import nn

library = torch.library.Library("ready_ops", "DEF")
library.define("compiles(Tensor x) -> Tensor")
ran = []


def compiles(x):
    if x.shape[0] not in ran:
        ran.append(x.shape[0])
        subprocess.run(["true"], check=True)
    return x + 1


library.impl("compiles", compiles, "CPU")
library.impl("compiles", lambda x: torch.empty_like(x), "Meta")


class Model(nn.Module):
    def forward(self, x):
        return torch.ops.ready_ops.compiles(x)
"""
SPEC = """
model: {target: ./ready_ops.py:Model}
device: cpu
inputs: {x: {shape: [n, 4], dtype: float32}}
dims: {n: {min: 1, max: 64}}
compile: {level: 0, ranges: [32]}
partition: {splitting_ops: ["ready_ops::compiles"]}
"""


def test_what_an_op_compiles_at_its_first_call_is_counted(tmp_path: Path) -> None:
    (tmp_path / "ready_ops.py").write_text(OPS)
    (tmp_path / "model.yaml").write_text(SPEC)
    cache = tmp_path / "cache"
    built = pipeline.build(tmp_path / "model.yaml", cache_dir=cache, prove=False)
    assert warm(tmp_path / "model.yaml", cache_dir=cache, run=False).compilations == 0
    assert warm(tmp_path / "model.yaml", cache_dir=cache).compilations == 2
    assert warm(built.hash, cache_dir=cache).compilations == 0


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
