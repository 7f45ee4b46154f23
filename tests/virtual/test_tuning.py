"""Tuning records in builds for a GPU that is not here: all but the clock is Inductor's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import fxc
from fxc import inductor_options, records, tuning
from fxc.cache import Cache
from fxc.errors import CompileError
from fxc.jobs import CompileJob, Reply, TuneJob, UserOps
from fxc.manifest import Manifest
from fxc.pool import Pool, environment
from fxc.tune import units
from fxc.tuning import Configuration, Entry
from tests.virtual.conftest import EXAMPLES
from tests.virtual.test_builds import SMALL

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch built for CUDA")

PIECE = """def piece(in_0: "f32[n, 1000]", in_1: "f32[1000]", in_2: "f32[n, 3000]"):
    mul = torch.ops.aten.mul.Tensor(in_0, in_0)  # f32[n, 1000]
    mean = torch.ops.aten.mean.dim(mul, [-1], True)  # f32[n, 1]
    rsqrt = torch.ops.aten.rsqrt.default(mean)  # f32[n, 1]
    mul_1 = torch.ops.aten.mul.Tensor(in_0, rsqrt)  # f32[n, 1000]
    mul_2 = torch.ops.aten.mul.Tensor(mul_1, in_1)  # f32[n, 1000]
    sum_1 = torch.ops.aten.sum.dim_IntList(in_2, [0])  # f32[3000]
    relu = torch.ops.aten.relu.default(in_2)  # f32[n, 3000]
    return (mul_2, relu, sum_1)
"""
"""A persistent reduction, another one, and a pointwise kernel."""
RECORD = records.find("h200")
Compile = Callable[..., Reply]


@pytest.fixture(scope="module")
def job(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CompileJob]:
    def make(kind: type[CompileJob], options: dict[str, Any]) -> CompileJob:
        return kind(
            id=0, label="piece", text=PIECE, dims={"n": (1, 4096, 1021)}, target=records.target(RECORD),
            options=options, ops=UserOps(), directory=str(tmp_path_factory.mktemp("job")), fast=False, record=RECORD,
            scratch=str(Cache.open(cache).scratch("compiler")),
        )  # fmt: skip

    return make


def options(level: int, clock: bool, table: dict[str, Configuration]) -> dict[str, Any]:
    plain = inductor_options.options(level, True, records.target(RECORD), clock=clock)
    return {**plain, **({"autotune_lookup_table": table} if table else {})}


@pytest.fixture
def compiled(job: Callable[..., CompileJob]) -> Compile:
    def run(level: int, clock: bool, table: dict[str, Configuration]) -> Reply:
        with Pool(1) as pool:
            pool.send(job(CompileJob, options(level, clock, table)))
            return pool.receive()

    return run


@pytest.fixture(scope="module")
def timed(job: Callable[..., CompileJob]) -> dict[str, Entry]:
    """What a job found, by hash."""
    script = Path(__file__).with_name("fake_clock.py")
    done = subprocess.run(
        [sys.executable, "-P", script],
        input=msgspec.json.encode(job(TuneJob, options(2, False, {}))),
        env=environment(os.environ), capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    found = {entry.pop("hash"): {**entry, "units": ("u",)} for entry in json.loads(done.stdout)["kernels"]}
    return msgspec.convert(found, dict[str, Entry])


def test_candidates_are_timed(timed: dict[str, Entry]) -> None:
    assert {"_".join(entry.name.split("_")[:2]) for entry in timed.values()} == {
        "triton_per",
        "triton_red",
        "triton_poi",
    }
    for entry in timed.values():
        assert entry.configuration != entry.rules
        assert entry.rules_us is not None
        assert entry.us < entry.rules_us
        assert entry.configuration["num_warps"] == 2
        blocks = {size for name, size in entry.configuration.items() if "BLOCK" in name}
        assert blocks == {32}
    data = tuning.encode(msgspec.structs.replace(tuning.empty(records.target(RECORD)), kernels=timed))
    assert tuning.decode(data, "it").kernels == timed


@pytest.mark.parametrize(("level", "clock"), [(2, False), (2, True), (3, True)])
def test_a_build_takes_them(compiled: Compile, timed: dict[str, Entry], level: int, clock: bool) -> None:
    """By rules, and where there is a clock: nothing is timed then, which would fail here."""
    reply = compiled(level, clock, {name: entry.configuration for name, entry in timed.items()})
    assert reply.result is not None, reply.detail
    kernels = {kernel["hash"]: kernel for kernel in reply.result["kernels"]}
    assert kernels.keys() == timed.keys(), "the hashes are those that were timed"
    assert {(kernel["chosen"], kernel["warps"]) for kernel in kernels.values()} == {("tuned", 2)}


def test_without_a_record_rules_choose(compiled: Compile, timed: dict[str, Entry]) -> None:
    reply = compiled(2, False, {"0" * 64: {"XBLOCK": 1, "num_warps": 1, "num_stages": 1}})
    assert reply.result is not None, reply.detail
    found = {kernel["hash"]: (kernel["chosen"], kernel["warps"]) for kernel in reply.result["kernels"]}
    assert found == {name: ("rules", entry.rules["num_warps"]) for name, entry in timed.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"XBLOCK": 8192}, "has XBLOCK 8192 for kernel triton_poi_fused_.*, expected 1 to 4096"),
        ({"YBLOCK": 8}, "has XBLOCK, YBLOCK for kernel triton_poi_fused_.*, expected XBLOCK"),
    ],
)
def test_a_configuration_that_does_not_fit(
    compiled: Compile, timed: dict[str, Entry], change: dict[str, int], message: str
) -> None:
    (name,) = [name for name, entry in timed.items() if "_poi_" in entry.name]
    reply = compiled(2, False, {name: {**timed[name].configuration, **change}})
    assert reply.result is None
    with pytest.raises(CompileError, match=message):
        raise CompileError(reply.error)


def test_a_build_with_a_record(build: Callable[..., Manifest], cache: Path, tmp_path: Path) -> None:
    """One kernel of one binary gets another configuration: that binary is another one, and the artifact."""
    plain = build("tiny_llama", "h200", *SMALL)
    goal, file = records.target(RECORD), tmp_path / "mine.json"
    kernel = next(k for binary in plain.binaries.values() for k in binary.kernels if "_per_" in k.name)
    other = {"XBLOCK": 1, "num_warps": 8, "num_stages": 1}
    entry = Entry(kernel.name, configuration=other, us=1.0, rules=other, rules_us=2.0, units=())
    scopes = tuple(unit.scope for unit in units(Cache.open(cache).artifact(plain.hash), EXAMPLES))
    with_all = msgspec.structs.replace(entry, units=scopes)
    file.write_bytes(tuning.encode(msgspec.structs.replace(tuning.empty(goal), kernels={kernel.hash: with_all})))
    every = ["device=cuda", "compile.sizes=[]", *SMALL]
    result = fxc.build(EXAMPLES / "tiny_llama.yaml", overrides=every, target="h200", cache_dir=cache, tuning=str(file))
    manifest = Cache.open(cache).artifact(result.hash).manifest
    assert result.hash != plain.hash
    tuned = [k for binary in manifest.binaries.values() for k in binary.kernels if k.chosen == "tuned"]
    assert {(k.hash, k.warps) for k in tuned} == {(kernel.hash, 8)}
    assert kernel.warps < 8
    again = fxc.build(EXAMPLES / "tiny_llama.yaml", overrides=every, target="h200", cache_dir=cache, tuning="none")
    assert (again.hash, again.hit) == (plain.hash, True)
