"""Benchmarks of small programs, built without a compiler: what is compared, timed and said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml

from fxc import eager, pipeline
from fxc.bench import bench, difference, tensors
from fxc.errors import RunError

MODELS = """
import torch
from torch import nn


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 16)
        self.out = nn.Linear(16, 8)

    def forward(self, x):
        y = self.out(self.table(x))
        return {"y": y, "most": y.argmax(-1), "n": x.shape[0]}


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


class Hides(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


class Writes(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Stores(nn.Module):
    def forward(self, x, cache):
        cache[:, : x.shape[0]] += x.t()
        return cache.sum(0)[: x.shape[0]]
"""
FLOATS = {"x": {"shape": ["n", 4], "dtype": "float32"}}
TABLE = {"x": {"shape": ["n"], "dtype": "int64", "values": [0, 100]}}
CACHE = {"cache": {"shape": [4, 64], "dtype": "float32", "bound": True}}
Build = Callable[..., str]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds a model of `MODELS` at level 0; the path of the artifact."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "models.py").write_text(MODELS)

    def make(name: str, inputs: Any, level: int = 0) -> str:
        path = folder / f"{name}.yaml"
        spec = {
            "model": {"target": f"./models.py:{name}"}, "device": "cpu", "inputs": inputs,
            "dims": {"n": {"min": 1, "max": 64}}, "compile": {"level": level, "sizes": [2, 8]},
        }  # fmt: skip
        path.write_text(yaml.safe_dump(spec))
        return pipeline.build(path, cache_dir=folder / "cache", prove=False).path

    return make


def test_result(build: Build) -> None:
    found = bench(build("Looks", TABLE), repeats=1)
    assert (found.model, found.device, found.repeats) == ("Looks", "cpu", 1)
    assert (found.context, found.bandwidth, found.cache, found.graphs) == (None, None, 0, {})
    assert found.variants == ["eager", "compiled", "piecewise", "full"]
    assert found.weights == 4 * (100 * 16 + 16 * 8 + 8)
    assert [size.size for size in found.sizes] == [{"n": 2}, {"n": 5}, {"n": 8}]
    for size in found.sizes:
        assert (size.tokens, size.served_by, size.own) == (size.size["n"], "n=1..64", False)
        assert size.bytes_read == 4 * (size.tokens * 16 + 16 * 8 + 8)
        assert (size.roofline_us, size.padding) == (None, {})
        assert size.errors == {"compiled": 0, "eager": 0}
        assert set(size.times) == {"compiled", "eager"}
        why = "CUDA graphs want a GPU, and this program runs on the CPU"
        assert size.missing == {"piecewise": why, "full": why}


@pytest.mark.parametrize(
    ("name", "inputs", "compared"),
    [
        ("Counts", FLOATS, True), ("Writes", FLOATS, True), ("Stores", {**FLOATS, **CACHE}, True),
        ("Hides", FLOATS, False), ("Draws", FLOATS, False),
    ],
)  # fmt: skip
def test_programs_that_keep_something(build: Build, name: str, inputs: Any, compared: bool) -> None:
    """What a call changes is put back before the next variant runs, unless it is the program's own."""
    found = bench(build(name, inputs), sizes=[3], repeats=1)
    expected = 0 if compared else None
    assert [size.errors for size in found.sizes] == [{"compiled": expected, "eager": expected}]


def test_a_wrong_result_names_the_variant(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = eager.Eager.forward

    def wrong(self: eager.Eager, **inputs: torch.Tensor) -> Any:
        first, *others = forward(self, **inputs)
        return (first * 1.01, *others)

    monkeypatch.setattr(eager.Eager, "forward", wrong)
    with pytest.raises(
        RunError, match=r"eager does not give what compiled gives at n=3: .* 0\.0\d+, accepted is 0.001"
    ):
        bench(build("Looks", TABLE), sizes=[3], repeats=1)


def test_a_variant_that_fails_is_left_out(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: eager.Eager, **inputs: torch.Tensor) -> Any:
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setattr(eager.Eager, "forward", fails)
    (size,) = bench(build("Looks", TABLE), sizes=[3], repeats=1).sizes
    assert set(size.times) == {"compiled"}
    assert size.missing["eager"] == "RuntimeError: no kernel"


def test_inputs_that_the_program_has_no_answer_to(build: Build) -> None:
    beyond = {"x": {"shape": ["n"], "dtype": "int64", "values": [100, 200]}}
    with pytest.raises(
        RunError, match="compiled fails on made-up inputs at n=3: IndexError: index out of range"
    ) as caught:
        bench(build("Looks", beyond), sizes=[3], repeats=1)
    assert caught.value.hint.startswith("give the inputs `values: [low, high]`")


def test_peers(build: Build) -> None:
    """In a process of its own, which imports Dynamo; without --peers none does."""
    path = build("Looks", TABLE)
    command = [sys.executable, "-m", "fxc", "bench", path, "--sizes", "3", "--repeats", "1", "--json", "-q"]
    done = subprocess.run([*command, "--peers"], capture_output=True, text=True, check=True)
    (size,) = json.loads(done.stdout)["sizes"]
    assert set(size["times"]) == {"eager", "compiled", "torch.compile"}
    assert size["errors"]["torch.compile"] < 1e-5
    assert size["missing"]["reduce-overhead"] == "CUDA graphs want a GPU, and this program runs on the CPU"


def test_no_compiler_without_peers(build: Build) -> None:
    code = (
        "import sys; from fxc.bench import bench; bench(sys.argv[1], sizes=[3], repeats=1);"
        "print([n for n in ('torch._dynamo', 'torch._inductor') if n in sys.modules])"
    )
    command = [sys.executable, "-c", code, build("Looks", TABLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": ""})
    assert done.stdout.strip() == "[]"


def test_difference() -> None:
    one = torch.ones(4, 3)
    assert difference([one, one * 2], [one, one * 2]) == 0
    assert difference([one * 1.5], [one]) == pytest.approx(0.5)
    assert difference([torch.cat([one, one * 3])], [torch.cat([one, one])]) == pytest.approx(2**0.5)
    assert difference([one * torch.nan], [one]) == float("inf")
    assert difference([one * torch.nan], [one * torch.nan]) == 0
    assert difference([torch.tensor([1])], [torch.tensor([7])]) == 0
    assert difference([], []) == 0
    for other in ([], [one, one], [one[:2]], [one.double()]):
        assert difference(other, [one]) == float("inf")


def test_tensors_of_a_result() -> None:
    a, b = torch.ones(1), torch.zeros(2)
    found = tensors({"a": a, "rest": (b, [3, None, a])})
    assert [tensor.tolist() for tensor in found] == [[1], [0, 0], [1]]
    a += 1
    assert found[0].tolist() == [1]
