"""Where replays of CUDA graphs go wrong if nobody takes care: each situation, and that the right thing happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxc
from fxc.errors import RunError
from fxc.runtime.program import Program
from tests.gpu import fault_models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
SIZES = [*range(1, 16), *range(16, 128, 8), 128]
"""30 of them."""

Make = Callable[..., tuple[Program, torch.nn.Module]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    def made(cls: type[torch.nn.Module], level: int = 0, **more: Any) -> tuple[Program, torch.nn.Module]:
        folder = tmp_path_factory.mktemp(cls.__name__)
        spec = {
            "model": {"target": f"{Path(fault_models.__file__)}:{cls.__name__}"}, "device": "cuda",
            "inputs": {"x": {"shape": ["n", 16], "dtype": "float32", "pad": 0}},
            "dims": {"n": {"min": 1, "max": 256}}, "compile": {"level": level}, **more,
        }  # fmt: skip
        (folder / "model.yaml").write_text(json.dumps(spec))
        result = fxc.build(folder / "model.yaml", cache_dir=folder / "cache")
        torch.manual_seed(0)
        model = cls().cuda().eval()
        return fxc.load(result.path).bind(model), model

    return made


def rows(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(n + 1000 * seed)
    return torch.randn(n, 16, device="cuda", generator=generator)


@torch.no_grad()
def test_not_a_number_in_rows_that_become_padding(make: Make) -> None:
    program, model = make(fault_models.Scaled)
    program.capture(sizes=[8])
    assert program(torch.full((8, 16), float("nan"), device="cuda")).isnan().all()
    found = program(rows(3))
    assert program.counters.padding == 5
    torch.testing.assert_close(found, model(rows(3)))


@torch.no_grad()
def test_random_numbers_are_new_at_each_replay(make: Make) -> None:
    program, model = make(fault_models.Noisy, level=1)
    program.capture(sizes=[8], copy=True)
    linear = model.linear(rows(8))  # type: ignore[operator]
    torch.cuda.manual_seed(7)
    first, second = program(rows(8)) - linear, program(rows(8)) - linear
    assert ((first > -1e-4) & (first < 1.0001)).all()
    assert (first - second).abs().mean() > 0.1
    torch.cuda.manual_seed(7)
    assert torch.equal(program(rows(8)) - linear, first)


@torch.no_grad()
def test_an_op_that_waits_for_the_gpu(make: Make) -> None:
    """Whole steps cannot hold it, and the error says which line; pieces around it can be captured."""
    program, model = make(fault_models.Waiting, level=1, partition={"splitting_ops": ["faults::largest"]})
    with pytest.raises(RunError, match=r"n=8 cannot be captured at line \d+ of \S+, `\w+ = faults_largest\(\w+\)"):
        program.capture("full", [8])
    torch.testing.assert_close(program(rows(8)), model(rows(8)))
    recorded = program.capture("full_and_piecewise", [8, 32])
    assert [(entry.mode, entry.size["n"]) for entry in recorded] == [("piecewise", 32), ("piecewise", 8)]
    for n in (8, 5, 32, 20, 33):
        torch.testing.assert_close(program(rows(n)), model(rows(n)))
    assert (program.counters.piecewise, program.counters.compiled) == (4, 1)
    assert "cannot be captured at line" in str(program.explain(n=33))


@torch.no_grad()
def test_state_is_as_before_the_capture(make: Make) -> None:
    program, _ = make(fault_models.Counting)
    program.capture(sizes=[4, 2])
    zeros = torch.zeros(4, 16, device="cuda")
    assert [program(zeros)[0, 0].item() for _ in range(3)] == [1, 2, 3]
    assert program(zeros[:2])[0, 0].item() == 4


@torch.no_grad()
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_the_pool_does_not_grow(make: Make, mode: str) -> None:
    """30 sizes take little more than the largest, and replays in any order nothing."""
    program, model = make(fault_models.Scaled)
    assert len(SIZES) == 30
    before = torch.cuda.memory_reserved()
    assert len(program.capture(mode, SIZES)) == 30
    captured = torch.cuda.memory_reserved()
    assert captured - before <= 64 << 20
    for again in (False, True):
        for n in (128, 1, 77, 8, 100, 3, 128):
            noise = torch.full((1 << 20,), float("nan"), device="cuda")
            torch.testing.assert_close(program(rows(n)), model(rows(n)))
            del noise
        if not again:  # what eager needs is there now
            captured = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == captured


@torch.no_grad()
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_somebody_clears_the_workspaces_of_cublas(make: Make, mode: str) -> None:
    """As torch.compile(mode="reduce-overhead") does: graphs must not write into memory that others have now."""
    program, model = make(fault_models.Wide)
    program.capture(mode, [8])
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    x = torch.randn(8, 16, device="cuda")
    for _ in range(3):
        found = program(x)
    torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-3)
    assert all(bool((tensor == 7.0).all()) for tensor in others)


@torch.no_grad()
def test_a_result_is_overwritten_by_another_size(make: Make) -> None:
    program, model = make(fault_models.Scaled)
    program.capture(sizes=[8, 4])
    first = program(rows(8))
    kept = first.clone()
    program(rows(8, 1))
    assert not torch.equal(first, kept)
    program.capture(sizes=[8, 4], copy=True)
    first = program(rows(8))
    program(rows(8, 1))
    program(rows(4, 1))
    torch.testing.assert_close(first, model(rows(8)))


@torch.no_grad()
def test_lazy_and_limited(make: Make) -> None:
    program, model = make(fault_models.Scaled)
    assert program.capture(sizes=[8, 64], lazy=True) == []
    torch.testing.assert_close(program(rows(7)), model(rows(7)))
    assert [entry.size["n"] for entry in program.capture_marked()] == [8]
    torch.testing.assert_close(program(rows(7)), model(rows(7)))
    assert (program.counters.compiled, program.counters.full) == (1, 1)
    assert program.capture(sizes=[8, 64], memory_limit=0) == []
    assert len(program.capture(sizes=[8, 64], memory_limit=1 << 30)) == 2


@torch.no_grad()
def test_what_was_captured_is_noted(make: Make) -> None:
    from fxc import capture_plan

    program, _ = make(fault_models.Scaled)
    recorded = program.capture(sizes=[8, 64])
    assert program._path is not None
    plan = capture_plan.read(capture_plan.beside(program._path))
    assert plan is not None
    assert (plan.device, plan.graphs) == (torch.cuda.get_device_name(), tuple(recorded))
