"""Benchmarks with graphs, by a recorder that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graphs import CallingAgain

from fxc import pipeline
from fxc.bench import bench
from fxc.progress import Observer
from fxc.runtime import Program, loader

MODEL = """
import torch
from torch import nn


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight
"""
SPEC = """
model: {target: ./model.py:Scales}
device: cpu
inputs: {x: {shape: [n, 4], dtype: float32%s}}
dims: {n: {min: 1, max: 64}}
compile: {level: 0, sizes: [2, 8]}
"""
Build = Callable[..., str]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds the model, with more about its input; the path of the artifact, which is loaded with the recorder."""

    def load(real: Callable[..., Program], *args: Any, **options: Any) -> Program:
        program = real(*args, **options)
        program._recorder = CallingAgain
        return program

    def make(more: str = "") -> str:
        (tmp_path / "model.py").write_text(MODEL)
        (tmp_path / "model.yaml").write_text(SPEC % more)
        path = pipeline.build(tmp_path / "model.yaml", cache_dir=tmp_path / "cache", prove=False).path
        monkeypatch.setattr(loader, "load", partial(load, loader.load))
        return path

    return make


class Phases(Observer):
    def __init__(self) -> None:
        self.done: list[str] = []

    def phase_done(self, name: str, seconds: float) -> None:
        self.done.append(name)


def test_sizes_are_replayed_padded_or_missing(build: Build) -> None:
    phases = Phases()
    found = bench(build(", pad: 0"), sizes=[2, 5, 8, 64], repeats=1, observer=phases)
    assert phases.done == ["capture piecewise", "capture full", "n=2", "n=5", "n=8", "n=64"]
    assert {mode: graphs.sizes for mode, graphs in found.graphs.items()} == {
        "piecewise": [{"n": 8}, {"n": 2}], "full": [{"n": 8}, {"n": 2}],
    }  # fmt: skip
    assert found.graphs["full"].bytes == 2 * CallingAgain(torch.device("cpu")).costs
    *served, large = found.sizes
    for size, padding in zip(served, (0, 3, 0), strict=True):
        assert size.padding == {"piecewise": padding, "full": padding}
        assert size.errors == dict.fromkeys(("compiled", "eager", "piecewise", "full"), 0.0)
        assert set(size.times) == set(found.variants)
        assert size.missing == {}
    assert set(large.times) == {"eager", "compiled"}
    assert large.missing["full"].startswith("larger than any full graph")
    assert large.missing["piecewise"].endswith("larger than any piecewise graph")


def test_inputs_without_padding(build: Build) -> None:
    found = bench(build(), sizes=[5], repeats=1)
    assert found.sizes[0].padding == {}
    assert "no full graph of these sizes" in found.sizes[0].missing["full"]


def test_a_capture_that_fails(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CallingAgain, *_: Any) -> Any:
        raise RuntimeError("not permitted when stream is capturing")

    path = build()
    monkeypatch.setattr(CallingAgain, "record", refuse)
    (size,) = bench(path, sizes=[8], repeats=1).sizes
    assert set(size.times) == {"eager", "compiled"}
    assert size.missing["full"].startswith("not captured: ")
    assert "not permitted when stream is capturing" in size.missing["full"]
