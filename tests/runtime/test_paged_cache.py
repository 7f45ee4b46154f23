"""Which blocks and slots sequences get, and inputs that are bound once, on a program written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxc.errors import InputError, RunError
from fxc.manifest import Input, Program
from fxc.runtime import CacheFullError, PagedCache, Sequence, load
from fxc.runtime import Program as Loaded
from fxc.shapes import Range
from fxc.spec import KVCacheSpec

Make = Callable[..., Path]
CODE = """
import torch
WEIGHTS = ()
def step_0(pieces, weights):
    def step(input_ids, positions, slot_mapping, block_table, seq_lens, query_starts, k_cache_0):
        k_cache_0.view(-1)[slot_mapping] = input_ids.float()
        return k_cache_0.view(-1)[slot_mapping] + positions
    return step
PIECES = {"step_0": ()}
"""
INPUTS = (
    Input(name="input_ids", shape=("num_tokens",), dtype="int64"),
    Input(name="positions", shape=("num_tokens",), dtype="int64"),
    Input(name="slot_mapping", shape=("num_tokens",), dtype="int64"),
    Input(name="block_table", shape=("num_requests", 3), dtype="int32"),
    Input(name="seq_lens", shape=("num_requests",), dtype="int32"),
    Input(name="query_starts", shape=("num_requests + 1",), dtype="int32"),
    Input(name="k_cache_0", shape=("num_blocks", 4, 1, 1), dtype="float32", mutated=True, bound=True),
)
BOX = Range((("num_tokens", 1, 16), ("num_requests", 1, 4), ("num_blocks", 2, 8)))


@pytest.fixture
def program(artifact: Make) -> Loaded:
    programs = (Program(range=BOX, step="step_0", binaries=()),)
    cache = KVCacheSpec(block_size=4)
    return load(artifact(code=CODE, inputs=INPUTS, weights=(), constants={}, programs=programs, kv_cache=cache))


def listed(inputs: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: tensor.tolist() for name, tensor in inputs.items()}


def test_slots_and_tables(program: Loaded) -> None:
    cache = PagedCache(program, 5)
    long, short = Sequence(), Sequence()
    assert (cache.bytes, cache.free_blocks) == (5 * 4 * 4, 5)
    inputs = cache.batch([(long, [7, 8, 9, 10, 11]), (short, [3])])
    assert listed(inputs) == {
        "input_ids": [7, 8, 9, 10, 11, 3],
        "positions": [0, 1, 2, 3, 4, 0],
        "slot_mapping": [0, 1, 2, 3, 4, 8],
        "block_table": [[0, 1, 0], [2, 0, 0]],
        "seq_lens": [5, 1],
        "query_starts": [0, 5, 6],
    }
    assert program(**inputs).tolist() == [7, 9, 11, 13, 15, 3]
    inputs = cache.batch([(short, [4]), (long, [12])])
    assert listed(inputs)["slot_mapping"] == [9, 5]
    assert listed(inputs)["positions"] == [1, 5]
    assert cache.tensors["k_cache_0"].view(-1)[:9].tolist() == [7, 8, 9, 10, 11, 0, 0, 0, 3]
    cache.free(long)
    assert (cache.free_blocks, long.length, long.blocks) == (4, 0, [])
    assert listed(cache.batch([(long, [1])]))["slot_mapping"] == [0]


def test_a_full_cache_changes_nothing(program: Loaded) -> None:
    cache = PagedCache(program, 2)
    first, second = Sequence(), Sequence()
    cache.batch([(first, [1, 2, 3, 4])])
    with pytest.raises(CacheFullError, match="the batch needs 2 blocks more, 1 are free"):
        cache.batch([(first, [5]), (second, [6])])
    assert (first.length, first.blocks, second.length, cache.free_blocks) == (4, [0], 0, 1)


def test_batches_that_cannot_be(program: Loaded, artifact: Make) -> None:
    cache = PagedCache(program, 8)
    with pytest.raises(RunError, match="entry 1 of the batch has no tokens"):
        cache.batch([(Sequence(), [1]), (Sequence(), [])])
    with pytest.raises(RunError, match="entry 0 of the batch has 13 tokens, expected at most 12"):
        cache.batch([(Sequence(), list(range(13)))])
    assert cache.free_blocks == 8
    programs = (Program(range=BOX, step="step_0", binaries=()),)
    plain = load(artifact("plain", code=CODE, inputs=INPUTS, weights=(), constants={}, programs=programs))
    with pytest.raises(RunError, match="Tiny was built without kv_cache"):
        PagedCache(plain, 4)


def test_bound_inputs(program: Loaded) -> None:
    ids = torch.tensor([1, 2])
    starts, one = torch.tensor([0, 2], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, 3, dtype=torch.int32)
    call = {
        "input_ids": ids, "positions": ids, "slot_mapping": ids, "block_table": table, "seq_lens": one,
        "query_starts": starts,
    }  # fmt: skip
    with pytest.raises(RunError, match="the program has no bound inputs yet: it needs k_cache_0") as caught:
        program(**call)
    assert caught.value.hint == "call program.bind_inputs(...) before the first call"
    cache = torch.zeros(2, 4, 1, 1)
    assert program.bind_inputs({"k_cache_0": cache}) is program
    assert program(**call).tolist() == [2.0, 4.0]
    assert cache.view(-1)[1:3].tolist() == [1.0, 2.0]  # the tensor itself, not a copy
    assert str(program.explain(num_tokens=2, num_requests=1)).startswith("num_tokens=1..16,num_requests=1..4")
    with pytest.raises(InputError, match=r"input query_starts has size 3 in dimension 0, expected 2, the num_requests"):
        program(**{**call, "query_starts": torch.zeros(3, dtype=torch.int32)})
    with pytest.raises(InputError, match="k_cache_0 is not an input; the program takes input_ids, positions"):
        program(**call, k_cache_0=cache)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "input k_cache_0, expected float32[num_blocks, 4, 1, 1]: missing"),
        ({"k_cache_0": torch.zeros(2, 4, 1, 1), "x": torch.zeros(1)}, "x is not an input; the program takes k_cache_0"),
        ({"k_cache_0": torch.zeros(2, 5, 1, 1)}, "input k_cache_0 has size 5 in dimension 1, expected 4"),
        ({"k_cache_0": torch.zeros(2, 4, 1, 1, dtype=torch.float16)}, "input k_cache_0 has dtype float16, expected"),
        ({"k_cache_0": torch.zeros(2, 4, 1, 2)[..., :1]}, "input k_cache_0 has stride (8, 2, 2, 1) for shape"),
        ({"k_cache_0": torch.zeros(9, 4, 1, 1)}, "num_blocks = 9 is out of bounds: the program was built for 2 to 8"),
    ],
)
def test_bound_inputs_that_do_not_fit(program: Loaded, tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(InputError) as caught:
        program.bind_inputs(tensors)
    assert caught.value.message.startswith(message)
    with pytest.raises(RunError, match="no bound inputs"):
        program()
