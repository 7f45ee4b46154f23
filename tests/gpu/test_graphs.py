"""Whole steps as CUDA graphs: what replays give, when they are overwritten, and what is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import fxc
from fxc.errors import RunError
from fxc.runtime.program import Program
from tests.gpu.test_cuda import TOLERANCE, built, cache, error, model, tokens  # noqa: F401  fixtures

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture
def program(built: Any, cache: Any, model: torch.nn.Module) -> Program:  # noqa: F811
    return fxc.load(built.hash, cache_dir=cache).bind(model)


@torch.no_grad()
def test_replays_equal_eager(program: Program, model: torch.nn.Module) -> None:  # noqa: F811
    """Compiled sizes by default, any other one by wish; the rest runs as before."""
    assert [entry.size for entry in program.capture()] == [{"num_tokens": 8}]
    captured = program.capture(sizes=[8, 1, 37])
    assert [entry.size["num_tokens"] for entry in captured] == [37, 8, 1]
    for count in (8, 37, 1, 8, 5, 64, 37):
        inputs = tokens(count)
        assert error(program(**inputs), model(**inputs)) < TOLERANCE, count


@torch.no_grad()
def test_pieces_replay_around_eager_attention(program: Program, model: torch.nn.Module) -> None:  # noqa: F811
    captured = program.capture("piecewise", [37, 8])
    assert [(entry.mode, entry.size["num_tokens"]) for entry in captured] == [("piecewise", 37), ("piecewise", 8)]
    for count in (8, 37, 8, 5, 64, 37):
        inputs = tokens(count)
        assert error(program(**inputs), model(**inputs)) < TOLERANCE, count
    assert (program.counters.piecewise, program.counters.compiled) == (4, 2)


@torch.no_grad()
def test_results_are_overwritten_unless_copied(program: Program) -> None:
    first, second = tokens(8), {"input_ids": tokens(8)["input_ids"].flip(0), "positions": tokens(8)["positions"]}
    program.capture()
    result = program(**first)
    kept = result.clone()
    program(**second)
    assert not torch.equal(result, kept)
    program.capture(copy=True)
    result = program(**first)
    program(**second)
    assert torch.equal(result, kept)


@torch.no_grad()
def test_values_may_change_in_place_and_tensors_may_not_move(program: Program, model: torch.nn.Module) -> None:  # noqa: F811
    program.capture()
    inputs = tokens(8)
    weight = model.get_parameter("head.weight") if hasattr(model, "head") else next(model.parameters())
    before = weight.detach().clone()
    weight.mul_(2)
    assert error(program(**inputs), model(**inputs)) < TOLERANCE
    weight.copy_(before)
    held = program._weights
    assert held is not None
    bound = next(tensor for tensor in held if tensor.data_ptr() == weight.data_ptr())
    moved = bound.clone()
    bound.set_(moved.untyped_storage(), 0, moved.shape, moved.stride())
    with pytest.raises(
        RunError, match=r"\S+ has moved since the graphs were captured: a replay would read the old place"
    ):
        program(**inputs)


@torch.no_grad()
def test_allocations_between_replays(program: Program, model: torch.nn.Module) -> None:  # noqa: F811
    program.capture(sizes=[8, 4, 2])
    for round_ in range(20):
        noise = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(4)]
        inputs = tokens((8, 4, 2)[round_ % 3])
        assert error(program(**inputs), model(**inputs)) < TOLERANCE
        del noise


@torch.no_grad()
def test_many_sizes_share_their_memory(program: Program) -> None:
    program.capture(sizes=[64])
    one = torch.cuda.memory_reserved()
    assert len(program.capture(sizes=list(range(1, 65)))) == 64
    assert torch.cuda.memory_reserved() - one <= 32 << 20


def test_two_threads(program: Program) -> None:
    program.capture()
    inputs, caught = tokens(8), []
    barrier = threading.Barrier(4)

    def serve() -> None:
        barrier.wait()
        for _ in range(300):
            try:
                program(**inputs)
            except RunError as problem:
                caught.append(problem.message)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another thread is in this program" in message for message in caught)
    torch.cuda.synchronize()


def test_none_drops_the_graphs(program: Program) -> None:
    program.capture()
    assert program.capture("none") == []
    first = program(**tokens(8))
    assert not torch.equal(first, program(input_ids=tokens(8)["input_ids"].flip(0), positions=tokens(8)["positions"]))
