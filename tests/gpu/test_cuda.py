"""The main job on an NVIDIA GPU: build, load in a new process, run, capture. Needs one; skipped elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxc
from fxc.pipeline import BuildResult
from tests.zoo.calls import MadeOnDevice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_llama.yaml"
ARGS = {"layers": 3, "hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 512, "vocab": 1024}
TOLERANCE = 0.05
"""Of the norm, in bfloat16: three layers whose roundings differ."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def built(cache: Path) -> BuildResult:
    overrides = [f"model.args={json.dumps(ARGS)}", "model.dtype=bfloat16", "device=cuda", "compile.sizes=[8]"]
    return fxc.build(EXAMPLE, overrides=overrides, cache_dir=cache)


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    sys.path.insert(0, str(EXAMPLE.parent))
    from tiny_llama import TinyLlama

    torch.manual_seed(0)
    return TinyLlama(**ARGS).to(device="cuda", dtype=torch.bfloat16).eval()


def tokens(count: int, device: str = "cuda") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, ARGS["vocab"], (count,), generator=generator)
    return {"input_ids": ids.to(device), "positions": torch.arange(count, device=device)}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_pieces_and_proof(built: BuildResult) -> None:
    assert (built.pieces, built.unique_pieces, built.binaries) == (7, 3, {"compiled": 6, "reused": 0})
    assert {line.shape for line in built.proof} == {f"num_tokens={n}" for n in (1, 2, 6, 8, 1021, 4096)}
    assert max(line.max_rel_err for line in built.proof) < 0.03


@torch.no_grad()
def test_equals_eager(built: BuildResult, cache: Path, model: torch.nn.Module) -> None:
    program = fxc.load(built.hash, cache_dir=cache).bind(model)
    for count in (1, 2, 5, 8, 9, 64, 1000, 4096):
        inputs = tokens(count)
        assert error(program(**inputs), model(**inputs)) < TOLERANCE, count


@torch.no_grad()
def test_a_step_can_be_captured_as_one_graph(built: BuildResult, cache: Path, model: torch.nn.Module) -> None:
    program = fxc.load(built.hash, cache_dir=cache).bind(model)
    for count in (8, 5):
        static = tokens(count)
        program(**static)  # cuBLAS makes its workspace
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = program(**static)
        static["input_ids"].copy_(tokens(count)["input_ids"].flip(0))
        graph.replay()
        assert error(out, model(**static)) < TOLERANCE


def test_a_server_imports_no_compiler(built: BuildResult) -> None:
    code = """
import sys, torch, fxc
program = fxc.load(sys.argv[1])
weights = {w.name: torch.zeros(w.shape, dtype=getattr(torch, w.dtype), device="cuda") for w in program.manifest.weights}
program.bind(weights)
ids = torch.zeros(5, dtype=torch.int64, device="cuda")
assert program(input_ids=ids, positions=ids).shape == (5, 1024)
torch.cuda.synchronize()
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, built.path], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@torch.no_grad()
def test_inputs_that_do_not_fit(built: BuildResult, cache: Path, model: torch.nn.Module) -> None:
    """A misaligned one is copied, one on the CPU refused."""
    program = fxc.load(built.hash, cache_dir=cache).bind(model)
    inputs = tokens(9)
    shifted = {name: value[1:] for name, value in inputs.items()}
    assert error(program(**shifted), model(**shifted)) < TOLERANCE
    with pytest.raises(fxc.InputError, match="input_ids"):
        program(**tokens(8, "cpu"))


@torch.no_grad()
def test_on_another_gpu(built: BuildResult, cache: Path, model: torch.nn.Module) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    program = fxc.load(built.hash, device="cuda:1", cache_dir=cache)
    program.bind({name: tensor.to("cuda:1") for name, tensor in model.state_dict().items()})
    inputs = tokens(5)
    moved = {name: tensor.to("cuda:1") for name, tensor in inputs.items()}
    found = program(**moved)
    assert found.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert error(found.to("cuda:0"), model(**inputs)) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("split", ["zoo::made", "zoo::mix"])  # new tensors made between pieces, and in them
def test_new_tensors_are_on_the_gpu_that_was_loaded_for(split: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    spec = MadeOnDevice.spec() | {"device": "cuda", "compile": {"level": 0}, "partition": {"splitting_ops": [split]}}
    (tmp_path / "model.yaml").write_text(json.dumps(spec))
    hash = fxc.build(tmp_path / "model.yaml", cache_dir=tmp_path).hash
    program = fxc.load(hash, device="cuda:1", cache_dir=tmp_path)
    inputs = [torch.randn(5, 8, device="cuda:1") for _ in range(2)]
    found = program(*inputs)
    for have, want in zip(found, MadeOnDevice()(*inputs), strict=True):
        assert have.device == torch.device("cuda:1")
        torch.testing.assert_close(have, want)
