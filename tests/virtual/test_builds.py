"""Builds for GPUs that are not here: wants a torch built for CUDA, and is for machines without a driver. Run by
`scripts/test-virtual`; what it finds goes into results.json beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import fxc
from fxc import inductor_options, machine, records
from fxc.cache import Cache
from fxc.errors import FxcError, IncompatibleError, PassError
from fxc.jobs import CompileJob, UserOps
from fxc.manifest import Manifest
from fxc.pool import Pool

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch built for CUDA")

SMALL = ("model.dtype=bfloat16", 'model.args={"layers":2,"hidden":256}')
ARCHS = {"a100": "sm_80", "l4": "sm_89", "h200": "sm_90", "b200": "sm_100"}
Build = Callable[..., Manifest]


@pytest.mark.parametrize("target", ARCHS)
def test_a_decoder(build: Build, target: str) -> None:
    manifest = build("tiny_llama", target, *SMALL)
    assert len(manifest.binaries) == 3
    kernels = [kernel for binary in manifest.binaries.values() for kernel in binary.kernels]
    assert {kernel.arch.rstrip("af") for kernel in kernels} == {ARCHS[target]}
    assert {kernel.chosen for kernel in kernels} == {"rules"}
    assert all(0 < kernel.registers <= 255 for kernel in kernels)
    assert manifest.target.properties["name"] == records.find(target).name
    assert (manifest.proved, manifest.verified) == (True, False)
    assert {line.form for line in manifest.proof if line.piece.startswith("step")} == {""}
    assert all(binary.needs["GLIBC"] for binary in manifest.binaries.values())


@pytest.mark.parametrize("target", ARCHS)
def test_an_encoder(build: Build, target: str) -> None:
    """MiniLM from Hugging Face: a batch and a length, attention between pieces."""
    manifest = build("minilm", target)
    kernels = [kernel for binary in manifest.binaries.values() for kernel in binary.kernels]
    assert {kernel.arch.rstrip("af") for kernel in kernels} == {ARCHS[target]}
    assert {piece.kind for pieces in manifest.pieces.values() for piece in pieces} == {"compiled", "eager"}
    assert manifest.proved


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """model.yaml of a Llama with a paged cache."""
    pytest.importorskip("transformers")
    from tests.huggingface import stock
    from tests.huggingface.test_generate import PAGED

    path = stock.write(tmp_path_factory.mktemp("models") / "paged_llama", "llama", level=2)
    path.write_text(path.read_text() + PAGED)
    return str(path)


@pytest.mark.parametrize("target", ARCHS)
def test_paged_attention(build: Build, paged: str, target: str) -> None:
    """Its kernels are in the binaries, and nothing is left to a server."""
    manifest = build(paged, target)
    kernels = {kernel.name for binary in manifest.binaries.values() for kernel in binary.kernels}
    assert {"attend", "norm_rope_write"} <= kernels
    assert {piece.kind for pieces in manifest.pieces.values() for piece in pieces} == {"compiled"}
    assert manifest.backends["fxc.attention.paged"] == "triton"


@pytest.mark.parametrize("target", ["l4", "h200", "b200"])
def test_fp8(build: Build, target: str) -> None:
    """Fusions to FP8 are in the binaries where the device has it."""
    manifest = build("fp8_llama", target)
    kernels = {kernel.name for binary in manifest.binaries.values() for kernel in binary.kernels}
    assert {"norm", "gated"} <= kernels
    assert {line.form for line in manifest.proof} == {"", "cpu"}


def test_fp8_is_refused_where_the_device_has_none(build: Build) -> None:
    with pytest.raises(PassError, match=r"norm_quant does not run on compute capability 8.0, .* is 4"):
        build("fp8_llama", "a100")


def test_nothing_stays_in_this_process(build: Build) -> None:
    build("tiny_llama", "h200", *SMALL)
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.get_device_properties(0)


def test_it_is_refused_where_there_is_no_device(build: Build, cache: Path) -> None:
    with pytest.raises(IncompatibleError, match="there is no CUDA device"):
        fxc.load(build("tiny_llama", "h200", *SMALL).hash, cache_dir=cache)


def test_a_record_that_promises_too_much_is_refused_on_the_device(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both values, before anything is loaded."""
    record = records.find("h200")
    file = tmp_path / "wrong.json"
    more = {**record.properties, "shared_memory_per_block_optin": 300000}
    file.write_bytes(records.encode(msgspec.structs.replace(record, properties=more)))
    overrides = ["device=cuda", "compile.level=0", *SMALL]
    built = fxc.build("examples/tiny_llama.yaml", target=str(file), overrides=overrides, cache_dir=cache)
    monkeypatch.setattr(machine, "_gpu", lambda index: (record.compute_capability, dict(record.properties)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(IncompatibleError, match="shared_memory_per_block_optin: built for 300000, here 232448"):
        fxc.load(built.hash, cache_dir=cache)


def test_a_second_build_finds_it(build: Build, cache: Path) -> None:
    manifest = build("tiny_llama", "h200", *SMALL)
    command = [sys.executable, "-m", "fxc", "build", "examples/tiny_llama.yaml", "--target", "h200", "--json"]
    for value in ("device=cuda", "compile.sizes=[]", *SMALL):
        command += ["--set", value]
    done = subprocess.run(
        [*command, "--cache-dir", cache], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert f'"hash":"{manifest.hash}"' in done.stdout, done.stderr
    assert '"hit":true' in done.stdout


ADD_ROWS = """def piece(in_0: "bf16[64, 128]", in_1: "i64[32]", in_2: "bf16[32, 128]"):
    index_put = torch.ops.aten.index_put.default(in_0, [in_1], in_2, True)  # bf16[64, 128]
    return (index_put,)
"""


@pytest.mark.parametrize(("target", "calls", "kernels"), [("a100", True, 1), ("h200", False, 2)])
def test_16_bit_atomics_are_used_where_the_device_has_them(
    cache: Path, tmp_path: Path, target: str, calls: bool, kernels: int
) -> None:
    """Adding rows in bfloat16, to a copy that one kernel makes, is another kernel from compute capability 9.0 on, and a
    call of torch's own before."""
    record = records.find(target)
    goal = records.target(record)
    job = CompileJob(
        id=0, label="add", text=ADD_ROWS, dims={}, target=goal, options=inductor_options.options(2, True, goal, clock=False),
        ops=UserOps(), directory=str(tmp_path), scratch=str(Cache.open(cache).scratch("compiler")), fast=False,
        record=record,
    )  # fmt: skip
    with Pool(1) as pool:
        pool.send(job)
        reply = pool.receive()
    assert reply.result is not None, reply.detail
    called = re.search(rb"aoti_torch_\w*index_put", Path(reply.result["library"]).read_bytes())
    assert (called is not None, len(reply.result["kernels"])) == (calls, kernels), reply.result


def test_host_code_is_for_a_level() -> None:
    with pytest.raises(FxcError, match="expected x86-64-v2"):
        fxc.build("examples/tiny_llama.yaml", target="h200", overrides=["device=cuda"], march="haswell")
