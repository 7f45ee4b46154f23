"""`fxc tune`, and `fxc build --tuning`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import fxc.tune as module
from fxc.cache import Artifact
from tests.test_tuning import FAST, RULES, entry


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
    done = fxc("tune", artifact.manifest.hash, "--json", "--output", "mine.json")
    assert done.json == msgspec.json.decode(msgspec.json.encode(found))
    assert (asked[0][0].path, asked[0][2], asked[0][4]) == (artifact.path, None, Path("mine.json"))
    lines = done.err.splitlines()
    assert "3 kernels, 2 faster than by rules" in lines
    assert [line.split() for line in lines if line.startswith("red ")] == [
        ["red", "spills", "2.5", *(f"{name}={value}" for name, value in FAST.items())]
    ]
    assert lines[-1] == "3 kernels of NVIDIA H200 in /cache/it.json"
    assert fxc("tune", artifact.manifest.hash, "-q").err == ""


def test_a_record_for_a_model_on_the_cpu(fxc: Any, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(
        "model: {target: ./none.py:Model}\ndevice: cpu\ninputs: {x: {shape: [4], dtype: float32}}\n"
    )
    done = fxc("build", "model.yaml", "--tuning", "mine.json", "--json")
    assert done.code == 2
    assert done.json["error"]["message"] == "--tuning mine.json: the model is for device cpu"
