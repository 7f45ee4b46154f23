"""A Hugging Face model with a paged cache on an NVIDIA GPU: attention is in the binaries, and a server has no Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxc
from fxc.pipeline import BuildResult
from fxc.runtime import PagedCache, Sequence

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

from tests.huggingface import stock  # noqa: E402
from tests.huggingface.test_generate import NEW, PAGED, PROMPTS, greedy  # noqa: E402

ROOT = Path(__file__).parents[2]
SERVER = """
import json, sys
sys.modules["triton"] = None
import torch, fxc
from examples.generate import Generator, Request
from fxc.runtime import PagedCache, Sequence
path, weights, prompts, new = sys.argv[1:]
program = fxc.load(path).bind(weights)
cache = PagedCache(program, 11)
captured = program.capture(sizes=[2, 4, 8])
assert [(entry.mode, entry.size["num_tokens"]) for entry in captured] == [
    ("full", 2), ("piecewise", 8), ("piecewise", 4), ("piecewise", 2)
], captured
requests = [Request(prompt, int(new)) for prompt in json.loads(prompts)]
with torch.no_grad():
    generator = Generator(program, cache, tokens=8, requests=3)
    generator.run(requests)
counters = program.counters
assert counters.full and counters.piecewise and not counters.compiled, counters
assert generator.evictions and not {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
print(json.dumps([request.answer for request in requests]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    path = stock.write(folder, "llama", level=2)
    text = path.read_text().replace("device: cpu", "device: cuda").replace("{level: 2}", "{level: 2, sizes: [2]}")
    path.write_text(text + PAGED)
    return folder


@pytest.fixture(scope="module")
def built(folder: Path) -> BuildResult:
    return fxc.build(folder / "model.yaml", cache_dir=folder / "cache")


def test_attention_is_compiled_and_proved(built: BuildResult, folder: Path) -> None:
    manifest = fxc.load(built.hash, cache_dir=folder / "cache").manifest
    assert {piece.kind for pieces in manifest.pieces.values() for piece in pieces} == {"compiled"}
    assert manifest.sizes == [{"num_tokens": 2}, {"num_tokens": 2, "num_requests": 2}]
    assert (built.pieces, built.unique_pieces) == (5, 4)
    assert max(line.max_rel_err for line in manifest.proof) < 1e-3


def test_greedy_tokens_without_triton(built: BuildResult, folder: Path) -> None:
    """Prefill in chunks, decode and eviction, in a process that has neither a compiler nor Triton."""
    model: Any = stock.stock(folder)
    model.save_pretrained(folder)
    command = [sys.executable, "-c", SERVER, built.path, str(folder), json.dumps(PROMPTS), str(NEW)]
    environ = {**os.environ, "PATH": "", "TRITON_CACHE_DIR": str(folder / "empty"), "PYTHONPATH": _path()}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [greedy(model, prompt) for prompt in PROMPTS]


@torch.no_grad()
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_replays_equal_what_runs_without_graphs(built: BuildResult, folder: Path, mode: str) -> None:
    """Prompts and decoding mixed, padded to the next size; attention writes where the next graph reads."""
    program = fxc.load(built.hash, cache_dir=folder / "cache").bind(stock.stock(folder).cuda())
    batches = [[5], [1, 1], [3, 2, 1], [1], [2, 6], [1, 1, 1]]
    found = {}
    for captured in (False, True):
        cache = PagedCache(program, 11)
        if captured:
            program.capture(mode, [8, 3, 2], copy=True)
        generator = torch.Generator().manual_seed(0)
        results = []
        for lengths in batches:
            entries = [(Sequence(), torch.randint(90, (n,), generator=generator).tolist()) for n in lengths]
            results.append(program(**cache.batch(entries)))
            for sequence, _ in entries:
                cache.free(sequence)
        found[captured] = results
    for plain, replayed in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(replayed, plain, rtol=1e-3, atol=1e-4)
    assert getattr(program.counters, mode) == (3 if mode == "full" else 6)


@torch.no_grad()
def test_capturing_writes_no_cache(built: BuildResult, folder: Path) -> None:
    program = fxc.load(built.hash, cache_dir=folder / "cache").bind(stock.stock(folder).cuda())
    cache = PagedCache(program, 11)
    for tensor in cache.tensors.values():
        tensor.normal_()
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    program.capture()
    assert all(torch.equal(cache.tensors[name], tensor) for name, tensor in before.items())


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, sys.path)])
