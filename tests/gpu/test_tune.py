"""Kernels timed on the GPU, and what builds make of that. Needs one; skipped elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxc
from fxc.cache import Cache
from fxc.manifest import Manifest
from fxc.pipeline import BuildResult
from tests.gpu.test_cuda import ARGS, EXAMPLE, TOLERANCE, error, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

OVERRIDES = [f"model.args={json.dumps(ARGS)}", "model.dtype=bfloat16", "device=cuda", "compile.sizes=[8]"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def plain(cache: Path) -> BuildResult:
    return fxc.build(EXAMPLE, overrides=OVERRIDES, cache_dir=cache)


@pytest.fixture(scope="module")
def tuned(cache: Path, plain: BuildResult) -> dict[str, Any]:
    command = [sys.executable, "-m", "fxc", "tune", plain.hash, "--json", "--cache-dir", str(cache)]
    done = subprocess.run([*command, "--output", str(cache / "mine.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def again(cache: Path, plain: BuildResult, tuned: dict[str, Any]) -> BuildResult:
    return fxc.build(EXAMPLE, overrides=OVERRIDES, cache_dir=cache)


def manifest(cache: Path, result: BuildResult) -> Manifest:
    return Cache.open(cache).artifact(result.hash).manifest


def test_what_was_timed(cache: Path, plain: BuildResult, tuned: dict[str, Any]) -> None:
    """Every kernel that a record can have, each at least as fast as by rules, as far as one run tells."""
    assert tuned["device"] == torch.cuda.get_device_name()
    known = {
        kernel.hash for binary in manifest(cache, plain).binaries.values() for kernel in binary.kernels if kernel.hash
    }
    assert known
    assert tuned["kernels"].keys() <= known, "the kernels are those of the build"
    assert tuned["kernels"]
    for entry in tuned["kernels"].values():
        assert entry["us"] > 0
        assert entry["rules_us"] is None or entry["us"] <= entry["rules_us"]
        assert entry["units"]
    print({entry["name"]: (entry["rules_us"], entry["us"]) for entry in tuned["kernels"].values()})
    assert Path(tuned["record"]).read_bytes() == (cache / "mine.json").read_bytes()


def test_the_next_build_takes_it(cache: Path, plain: BuildResult, tuned: dict[str, Any], again: BuildResult) -> None:
    assert again.hash != plain.hash
    assert not again.hit
    kernels = [kernel for binary in manifest(cache, again).binaries.values() for kernel in binary.kernels]
    for kernel in kernels:
        if kernel.hash in tuned["kernels"]:
            wanted = tuned["kernels"][kernel.hash]["configuration"]
            assert (kernel.chosen, kernel.warps) == ("tuned", wanted["num_warps"])
    assert {kernel.hash for kernel in kernels if kernel.chosen == "tuned"} == tuned["kernels"].keys()


def test_it_is_found_again(cache: Path, plain: BuildResult, again: BuildResult) -> None:
    for tuning, hash in (("auto", again.hash), (str(cache / "mine.json"), again.hash), ("none", plain.hash)):
        found = fxc.build(EXAMPLE, overrides=OVERRIDES, cache_dir=cache, tuning=tuning)
        assert (found.hash, found.hit) == (hash, True), tuning


def test_it_is_right(cache: Path, plain: BuildResult, again: BuildResult) -> None:
    """Proved by its build, and next to the program without a record."""
    assert again.proved
    programs = [fxc.load(result.hash, cache_dir=cache) for result in (plain, again)]
    generator = torch.Generator("cuda").manual_seed(0)
    weights = {
        weight.name: torch.randn(weight.shape, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.05
        for weight in programs[0].manifest.weights
    }
    for program in programs:
        program.bind(weights)
    for count in (1, 8, 37):
        one, other = (program(**tokens(count)) for program in programs)
        assert error(other, one) < TOLERANCE
