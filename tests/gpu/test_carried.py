"""An artifact that was built on a machine without a GPU: loaded here with no compilation, verified, and under the key
of one that is built here. `benchmarks/carried.py` compares their steps.

FXC_CARRIED names the artifact of examples/tiny_llama.yaml, a file of `fxc export` for this kind of GPU:

    fxc build examples/tiny_llama.yaml --target h200 --set device=cuda --set model.dtype=bfloat16
    fxc export HASH carried.tar
"""

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
from fxc.cache import Cache, Trust

CARRIED = os.environ.get("FXC_CARRIED", "")
pytestmark = pytest.mark.skipif(
    not CARRIED or not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and FXC_CARRIED"
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("carried")


@pytest.fixture(scope="module")
def hash(cache: Path) -> str:
    artifact = Cache.open(cache).import_file(Path(CARRIED), Trust())
    assert not artifact.manifest.verified
    return artifact.manifest.hash


def command(cache: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "fxc", *words, "--cache-dir", cache, "--json"], capture_output=True, text=True, cwd=ROOT
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "code": done.returncode, "stderr": done.stderr}


def test_it_compiles_nothing_and_says_that_it_is_not_verified(cache: Path, hash: str) -> None:
    assert command(cache, "warm", hash, "--require-verified")["code"] == 5
    warm = command(cache, "warm", hash)
    assert (warm["code"], warm["compilations"], warm["verified"]) == (0, 0, False), warm["stderr"]


def test_it_is_right_at_all_edges(cache: Path, hash: str) -> None:
    found = command(cache, "verify", hash, "--run")
    assert found["code"] == 0, found["stderr"]
    assert found["artifacts"][0]["verified"]
    manifest = Cache.open(cache).artifact(hash).manifest
    ends = {f"num_tokens={value}" for value in (1, 2, manifest.spec.dims["num_tokens"].max)}
    for binary in manifest.binaries.values():
        shapes = {line.shape for line in binary.proof}
        assert shapes >= (ends if ".." in binary.range else {binary.range})
        assert {line.form for line in binary.proof} == {""}
    assert command(cache, "warm", hash, "--require-verified")["code"] == 0


def test_the_key_is_that_of_a_native_build(cache: Path, hash: str, tmp_path: Path) -> None:
    """But for the compiler, which may be another one here."""
    spec = Cache.open(cache).artifact(hash).manifest.spec
    overrides = ["device=cuda", f"model.dtype={spec.model.dtype}", f"model.args={json.dumps(spec.model.args)}"]
    overrides.append(f"compile.sizes={json.dumps(spec.compile.sizes)}")
    built = fxc.build(ROOT / "examples" / "tiny_llama.yaml", overrides=overrides, cache_dir=tmp_path, prove=False)
    ours = {factor.name: factor.value for factor in Cache.open(cache).artifact(hash).manifest.factors}
    theirs = {factor.name: factor.value for factor in Cache.open(tmp_path).artifact(built.hash).manifest.factors}
    differing = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
    assert differing.keys() <= {"compiler"}, differing
