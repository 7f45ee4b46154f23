"""`fxc push`, `fxc pull`, and `warm` and `build` that look in a remote cache first."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fxc.cache import Artifact
from tests.cache.faulty import FAULTS

HASH = "abcd" + "0" * 28
MODEL = """import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return x @ self.weight
"""
SPEC = {
    "model": {"target": "./linear.py:Linear"},
    "device": "cpu",
    "inputs": {"x": {"shape": ["n", 4], "dtype": "float32"}},
    "dims": {"n": {"min": 1, "max": 64}},
    "compile": {"sizes": [8], "level": 0},
}


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    """Makes another machine's copy of the project, and gives where its model.yaml lies."""

    def make(name: str, model: str = MODEL) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "linear.py").write_text(model)
        (tmp_path / name / "model.yaml").write_text(json.dumps(SPEC))
        sys.modules.pop("linear", None)
        return f"{name}/model.yaml"

    return make


def test_push_and_pull(fxc: Any, artifact: Artifact, tmp_path: Path) -> None:
    told = fxc("push", "abcd", "--remote", "remote")
    assert (told.code, told.out) == (0, HASH + "\n")
    assert [line.split()[0] for line in told.err.splitlines()] == ["push", "pushed:"]
    assert fxc("push", "abcd", "--remote", "remote").err.splitlines()[-1] == "pushed: all of it is at remote"
    told = fxc("pull", "abcd", "--remote", f"file://{tmp_path}/remote", "--cache-dir", "other", "--json", "-q")
    size = sum(file.bytes for file in artifact.manifest.ranks["rank_0_0"].files.values())
    assert told.json == {
        "hash": HASH, "path": str(tmp_path / "other/v1/artifacts" / HASH), "remote": f"file://{tmp_path}/remote", "bytes": size,
    }  # fmt: skip
    assert fxc("verify", "--cache-dir", "other").code == 0
    assert fxc("push", "abcd", "--remote", "again", "--json", "-q").json == {
        "hash": HASH,
        "remote": "again",
        "bytes": size,
    }


def test_the_environment_names_it(
    fxc: Any, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXC_REMOTE", str(tmp_path / "remote"))
    assert fxc("push", "abcd", "-q").code == 0
    assert fxc("pull", HASH, "-q", "--cache-dir", "other").code == 0
    assert fxc("pull", "abcd", "-q", "--cache-dir", "more", "--remote", "empty").code == 3


def test_errors(fxc: Any, artifact: Artifact) -> None:
    for verb in ("push", "pull"):
        told = fxc(verb, "abcd", "--json")
        assert (told.code, told.json["error"]["hint"]) == (2, "give --remote URL or set FXC_REMOTE")
        assert fxc(verb, "abcd", "--remote", "nonsense://x").code == 2
    assert fxc("build", "model.yaml", "--push").code == 2
    assert fxc("push", "dddd", "--remote", "remote").code == 3
    assert fxc("pull", "dddd", "--remote", "remote").code == 3
    fxc("push", "abcd", "--remote", "remote")
    for pack in Path("remote/v1/packs").iterdir():
        pack.unlink()
    assert fxc("pull", "abcd", "--remote", "remote", "--cache-dir", "other").code == 5


def test_from_one_machine_to_many(fxc: Any, machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Build and push; elsewhere warm by model.yaml and by hash, over a read-only place too. Nobody traces again."""
    first = machine("first")
    built = fxc("build", first, "--no-prove", "--push", "--remote", "remote", "--cache-dir", "a", "--json", "-q").json
    second = machine("second")
    monkeypatch.setenv("FXC_REMOTE", str(tmp_path / "remote"))
    from fxc import plan

    def refuse(*_: object) -> None:
        raise AssertionError("traced")

    with monkeypatch.context() as patched:
        patched.setattr(plan, "make_plan", refuse)
        told = fxc("warm", second, "--require-hit", "--cache-dir", "b", "--json")
        assert (told.code, told.json["hash"], told.json["hit"], told.json["built"]) == (0, built["hash"], True, False)
        assert "pull " in told.err
        assert "pull " not in fxc("warm", second, "--require-hit", "--cache-dir", "b").err
        assert fxc("warm", built["hash"][:8], "--cache-dir", "c").code == 0
        told = fxc("build", second, "--no-prove", "--cache-dir", "d", "--json")
        assert (told.json["hash"], told.json["hit"]) == (built["hash"], True)
        assert fxc("pull", second, "--cache-dir", "e", "-q").out == built["hash"] + "\n"
        shutil.rmtree("remote")
        monkeypatch.setenv("FXC_CACHE_PATH", str(tmp_path / "b"))
        assert fxc("warm", second, "--require-hit", "--cache-dir", "f").code == 0
        assert not Path("f/v1").exists()


def test_found_after_a_trace(fxc: Any, machine: Any, tmp_path: Path) -> None:
    """Another comment in the source: traced, and not built."""
    first = machine("first")
    options = ("--no-prove", "--remote", "remote", "--json", "-q")
    built = fxc("build", first, "--push", "--cache-dir", "a", *options).json
    told = fxc("build", machine("second", "# a comment\n" + MODEL), "--cache-dir", "b", *options)
    assert (told.code, told.json["hash"], told.json["hit"]) == (0, built["hash"], True)
    told = fxc("build", "second/model.yaml", "--cache-dir", "b", *options, "--force")
    assert (told.json["hit"], told.json["hash"]) == (False, built["hash"])


def test_a_remote_that_fails_is_no_reason_to_do_nothing(
    fxc: Any, machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FAULTS.clear()
    FAULTS.plan("ls", *[ConnectionError("reset by peer")] * 99)
    FAULTS.plan("cat_file", *[ConnectionError("reset by peer")] * 99)
    url = f"faulty://{tmp_path}/remote"
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    told = fxc("build", machine("first"), "--no-prove", "--remote", url)
    assert told.code == 0
    assert f"not from {url}: cannot list index/" in told.err
    told = fxc("warm", "first/model.yaml", "--require-hit", "--remote", url, "--cache-dir", "other")
    assert told.code == 3
    assert "reset by peer" in told.err
