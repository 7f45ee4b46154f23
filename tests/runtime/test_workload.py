"""Which sizes are run, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from handmade import write

from fxc.errors import UsageError
from fxc.manifest import Input, Manifest, Program, decode
from fxc.runtime import load
from fxc.shapes import Range
from fxc.spec import CompileSpec, KVCacheSpec
from fxc.workload import Workload, between, points, room, tokens

CODE = """
import torch
from handmade import write
WEIGHTS = ()
def step_0(pieces, weights):
    def step(input_ids, positions, slot_mapping, block_table, seq_lens, query_starts, k_cache_0):
        return input_ids
    return step
PIECES = {"step_0": ()}
"""
INPUTS = (
    Input(name="input_ids", shape=("num_tokens",), dtype="int64", values=(5, 9)),
    Input(name="positions", shape=("num_tokens",), dtype="int64", values=(0, 40)),
    Input(name="slot_mapping", shape=("num_tokens",), dtype="int64"),
    Input(name="block_table", shape=("num_requests", 10), dtype="int32"),
    Input(name="seq_lens", shape=("num_requests",), dtype="int32"),
    Input(name="query_starts", shape=("num_requests + 1",), dtype="int32"),
    Input(name="k_cache_0", shape=("num_blocks", 4, 1, 2), dtype="float32", mutated=True, bound=True),
)
PAGED = (("num_tokens", 1, 16), ("num_requests", 1, 6), ("num_blocks", 2, 64))


def box(*bounds: tuple[str, int, int]) -> Program:
    return Program(range=Range(bounds), step="step_0", binaries=())


def manifest(programs: Sequence[Program], **changes: Any) -> Manifest:
    inputs = tuple(Input(name=name, shape=(name,), dtype="float32") for name, _, _ in programs[-1].range.bounds)
    made = decode((write(Path(changes.pop("folder")), programs=programs) / "manifest.json").read_bytes(), "here")
    return msgspec.structs.replace(made, **{"inputs": inputs, **changes})


def paged(folder: Path, programs: Sequence[Program] = (box(*PAGED),)) -> Path:
    return write(
        folder / "paged", code=CODE, inputs=INPUTS, weights=(), constants={}, programs=programs,
        kv_cache=KVCacheSpec(block_size=4),
    )  # fmt: skip


def paged_manifest(folder: Path, programs: Sequence[Program]) -> Manifest:
    return decode((paged(folder, programs) / "manifest.json").read_bytes(), "here")


@pytest.mark.parametrize(
    ("sizes", "low", "high", "other"),
    [
        ({1, 8, 64}, 1, 4096, 36), ({1}, 1, 8, 2), ({4}, 1, 4, 2), (set(), 1, 8, 1), (set(), 0, 8, 0),
        ({7, 8}, 1, 8, 6), ({1, 2}, 1, 2, None), ({3}, 3, 3, None), ({2, 3, 4}, 1, 4, 1),
    ],
)  # fmt: skip
def test_between(sizes: set[int], low: int, high: int, other: int | None) -> None:
    assert between(sizes, low, high) == other


def test_points_of_one_dimension(tmp_path: Path) -> None:
    found = manifest([box(("n", 64, 64)), box(("n", 8, 8)), box(("n", 1, 512))], folder=tmp_path)
    assert points(found) == [{"n": 8}, {"n": 36}, {"n": 64}]
    assert points(found, [512, {"n": 3}, 3]) == [{"n": 3}, {"n": 512}]
    assert tokens(found, {"n": 36}) == 36


def test_points_below_level_2(tmp_path: Path) -> None:
    found = manifest([box(("n", 1, 512))], folder=tmp_path)
    spec = msgspec.structs.replace(found.spec, compile=CompileSpec(level=1, sizes=(4, 1000)))
    assert points(msgspec.structs.replace(found, spec=spec)) == [{"n": 2}, {"n": 4}]


def test_points_of_two_dimensions(tmp_path: Path) -> None:
    whole = (("batch", 1, 8), ("seq", 1, 64))
    found = manifest(
        [box(("batch", 1, 1), ("seq", 32, 32)), box(("batch", 1, 1), whole[1]), box(*whole)], folder=tmp_path
    )
    assert points(found) == [{"batch": 1, "seq": 1}, {"batch": 2, "seq": 1}, {"batch": 1, "seq": 32}]
    assert points(found, [{"seq": 5, "batch": 2}]) == [{"batch": 2, "seq": 5}]
    assert tokens(found, {"batch": 2, "seq": 5}) == 10


def test_points_of_a_decode_batch(tmp_path: Path) -> None:
    """One token for each request: of 12 tokens there is no such batch, as there are at most 6 requests."""
    fixed = [box(*((n, size, size) if n == "num_tokens" else (n, lo, hi) for n, lo, hi in PAGED)) for size in (2, 12)]
    found = paged_manifest(tmp_path, [*fixed, box(*PAGED)])
    assert points(found) == [{"num_tokens": n, "num_requests": n} for n in (1, 2)]
    assert points(found, [6]) == [{"num_tokens": 6, "num_requests": 6}]
    assert tokens(found, {"num_tokens": 6, "num_requests": 6}) == 6


def test_points_of_a_static_program(tmp_path: Path) -> None:
    assert points(manifest([box()], folder=tmp_path)) == [{}]


@pytest.mark.parametrize(
    ("bounds", "size", "message"),
    [
        ([("n", 1, 64)], 65, r"size n=65: n = 65 is out of bounds: the program was built for 1 to 64"),
        ([("n", 1, 64)], {"m": 3}, r"size m=3 is none of this program"),
        ([("b", 1, 8), ("s", 1, 8)], 4, r"size 4 does not say which dimension; there are 2"),
        ([("b", 1, 8), ("s", 1, 8)], {"b": 4}, r"size b=4 is none of this program"),
        ([], 4, r"size 4 does not say which dimension; there are 0"),
    ],
)
def test_sizes_that_are_none(
    tmp_path: Path, bounds: list[tuple[str, int, int]], size: int | Mapping[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        points(manifest([box(*bounds)], folder=tmp_path), [size])
    assert caught.value.hint


def test_a_decode_batch_has_one_token_for_each_request(tmp_path: Path) -> None:
    found = paged_manifest(tmp_path, [box(*PAGED)])
    with pytest.raises(UsageError, match="size num_tokens=4,num_requests=2 is none of this program"):
        points(found, [{"num_tokens": 4, "num_requests": 2}])
    with pytest.raises(UsageError, match="size num_tokens=7,num_requests=7: num_requests = 7 is out of bounds"):
        points(found, [7])


def test_decode_batches(tmp_path: Path) -> None:
    program = load(paged(tmp_path))
    sizes = [{"num_tokens": n, "num_requests": n} for n in (1, 3)]
    work = Workload(program, sizes, 17)
    assert work.context == 17
    assert work.bound["k_cache_0"].shape == (15, 4, 1, 2)
    assert work.bound["k_cache_0"].std() > 0.5
    for size in sizes:
        made = work.inputs(size)
        rows = size["num_requests"]
        assert made["positions"].tolist() == [17] * rows
        assert made["seq_lens"].tolist() == [18] * rows
        assert made["query_starts"].tolist() == list(range(rows + 1))
        assert made["slot_mapping"].tolist() == [17, 37, 57][:rows]
        assert set(made["input_ids"].tolist()) <= {5, 6, 7, 8}
        assert program(**made).shape == (rows,)
        assert work.bytes_read(size, {}) == rows * 18 * 2 * 4


def test_context_that_fits(tmp_path: Path) -> None:
    found = paged_manifest(tmp_path, [box(*PAGED)])
    block = 4 * 2 * 4
    assert room(found, 1, 1 << 30) == (39, 2)  # 40 positions, 10 blocks
    assert room(found, 16, 1 << 30) == (15, 2)  # 64 blocks
    assert room(found, 2, 7 * block) == (11, 2)  # 7 blocks of memory
    with pytest.raises(UsageError, match="65 requests do not fit into a cache"):
        room(found, 65, 1 << 30)
    size = [{"num_tokens": 1, "num_requests": 1}]
    assert Workload(load(tmp_path / "paged"), size).context == 39
    with pytest.raises(UsageError, match="--context 40 does not fit, expected at most 39 for 1 requests"):
        Workload(load(tmp_path / "paged"), size, 40)


def test_weights_that_are_read(tmp_path: Path) -> None:
    work = Workload(load(write(tmp_path / "linear")), [{"n": 1}])
    assert work.context is None
    assert work.bytes_read({"n": 3}, {}) == 64
    assert work.bytes_read({"n": 3}, {"linear.weight": 1}) == 48
    assert work.bytes_read({"n": 9}, {"linear.weight": 1}) == 64
    made = work.inputs({"n": 3})
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {"x": (3, 4), "scale": (3, 1)}
    assert torch.equal(work.weights["linear.weight"], Workload(load(tmp_path / "linear"), []).weights["linear.weight"])
