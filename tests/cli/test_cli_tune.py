"""`fxc tune`, and `fxc build --tuning`."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fxc.tune as module
from fxc import tuning
from fxc.cache import Artifact
from tests.test_tuning import FAST, RULES, entry, record


def test_what_cannot_be_tuned(fxc: Any, artifact: Artifact) -> None:
    refused = fxc("tune", artifact.manifest.hash, "--json")
    assert refused.code == 2
    assert refused.json["error"]["message"].endswith("is for device cpu: only kernels of GPUs are tuned")
    assert fxc("tune", "beef0000").code == 3
    assert fxc("tune").code == 2


def test_what_is_said(fxc: Any, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = {"aa": entry("u"), "bb": entry("u", name="red", rules_us=None), "cc": entry("u", configuration=RULES)}
    found = module.Tuned(artifact.manifest.hash, "/cache/it.json", "NVIDIA H200", 2, kernels)
    asked: list[Any] = []

    def tune(*arguments: Any) -> module.Tuned:
        asked.append(arguments)
        return found

    monkeypatch.setattr(module, "tune", tune)
    done = fxc("tune", artifact.manifest.hash, "--json")
    assert done.json == msgspec.json.decode(msgspec.json.encode(found))
    assert (asked[0][0].path, asked[0][2]) == (artifact.path, None)
    lines = done.err.splitlines()
    assert "3 kernels, 2 faster than by the rules that `--target` goes by" in lines
    assert [line.split() for line in lines if line.startswith("red ")] == [
        ["red", "-", "2.5", *(f"{name}={value}" for name, value in FAST.items())]
    ]
    assert lines[-1] == "3 kernels of NVIDIA H200 in /cache/it.json"
    assert fxc("tune", artifact.manifest.hash, "-q").err == ""
    found = module.Tuned(artifact.manifest.hash, "", "NVIDIA H200", 2, {})
    assert fxc("tune", artifact.manifest.hash).err.splitlines() == ["0 kernels of NVIDIA H200: there is no record"]


def test_the_record_in_a_file(fxc: Any, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the cache has of the GPU. That it cannot be written is found out before anything is timed, if it can be."""
    asked: list[Any] = []
    whole = record(aa=entry("u"))

    def tune(*arguments: Any) -> module.Tuned:
        asked.append(arguments)
        return module.Tuned(artifact.manifest.hash, "/cache/it.json", "NVIDIA H200", 2, {})

    monkeypatch.setattr(module, "tune", tune)
    monkeypatch.setattr(tuning, "stored", lambda cache, target: whole)
    for file, message in {"no/mine.json": "there is no directory no", str(tmp_path): "is a directory"}.items():
        refused = fxc("tune", artifact.manifest.hash, "--output", file, "--json")
        assert refused.code == 2
        assert message in refused.json["error"]["message"]
    assert fxc("tune", artifact.manifest.hash, "--output", "-", "--json").code == 2
    assert not asked
    assert fxc("tune", artifact.manifest.hash, "--output", "mine.json").code == 0
    assert (tmp_path / "mine.json").read_bytes() == tuning.encode(whole)
    assert fxc("tune", artifact.manifest.hash, "--output", "-").out.encode() == tuning.encode(whole)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        failed = fxc("tune", artifact.manifest.hash, "--output", "mine.json", "--json")
    assert failed.json["error"] == {
        "code": 1, "kind": "FxcError", "message": "--output mine.json cannot be written: No space left on device",
        "hint": "what was timed is in /cache/it.json",
    }  # fmt: skip


def test_a_record_for_a_model_on_the_cpu(fxc: Any, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(
        "model: {target: ./none.py:Model}\ndevice: cpu\ninputs: {x: {shape: [4], dtype: float32}}\n"
    )
    done = fxc("build", "model.yaml", "--tuning", "mine.json", "--json")
    assert done.code == 2
    assert done.json["error"]["message"] == "--tuning mine.json: the model is for device cpu"
