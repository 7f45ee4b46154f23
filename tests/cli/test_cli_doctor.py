"""`fxc doctor`, with faults made on purpose."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from fxc import cuda_sdk, machine
from fxc.cli import checks


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load probe libraries without importing torch first, which takes seconds."""
    monkeypatch.setattr(checks, "LOAD", checks.LOAD.replace(", torch", ""))


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def test_names_and_form(fxc: Any) -> None:
    told = fxc("doctor", "--json")
    found = {check["name"]: check for check in told.json["checks"]}
    assert list(found) == [
        "python", "torch", "compiler", "strip", "cache", "cuda", "triton", "python headers", "transformers",
    ]  # fmt: skip
    assert found["python"]["ok"]
    assert found["torch"]["ok"]
    assert found["compiler"]["ok"]
    assert told.json["ok"] == all(check["ok"] or not check["needed"] for check in found.values())
    assert told.code == (0 if told.json["ok"] else 1)


def test_what_is_not_ok(fxc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = checks.Check("strip", False, True, "not on PATH", "apt install binutils")
    optional = checks.Check("triton", False, False, "not installed", "pip install it")
    monkeypatch.setattr(checks, "every", lambda cache_dir: iter([bad, optional]))
    told = fxc("doctor", "-q")
    assert told.code == 1
    assert told.err == "NO  strip           not on PATH\n                    apt install binutils\n"
    assert "--  triton          not installed\n" in fxc("doctor").err
    assert fxc("doctor", "--json").json["ok"] is False


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nope/g++")
    found = checks.compiler()
    assert (found.ok, found.found) == (False, "/nope/g++: CXX names it, not found")


@pytest.mark.usefixtures("without_torch")
def test_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "echo 'x: error: no libc' >&2; exit 1")))
    found = checks.compiler()
    assert not found.ok
    assert found.found.endswith("cannot make a library: x: error: no libc")


@pytest.mark.usefixtures("without_torch")
def test_compiler_whose_libraries_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = shutil.which("g++")
    wrapper = f'case "$1" in --version) exec {real} "$@";; esac; exec {real} -Dfxc_probe=other "$@"'
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", wrapper)))
    found = checks.compiler()
    assert not found.ok
    assert "when it loads a library that this compiler made" in found.found
    assert found.mend == "export CXX=/usr/bin/g++"


@pytest.mark.usefixtures("without_torch")
def test_compiler_that_links_statically(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = shutil.which("g++")
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", f'exec {real} -static-libstdc++ "$@"')))
    found = checks.compiler()
    assert not found.ok
    assert found.found.endswith("it links the C++ library statically")


def test_no_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert checks.strip() == checks.Check("strip", False, True, "not on PATH", "apt install binutils")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = checks.cache(tmp_path / "file" / "cache")
    assert not found.ok
    assert found.found.startswith("cannot be written: ")


def test_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FREE", 1 << 60)
    assert not checks.cache(tmp_path).ok
    assert not list(tmp_path.iterdir())


def test_torch_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "TORCH", ((3, 0), (3, 1)))
    found = checks.torch()
    assert (found.ok, found.mend) == (False, "pip install 'torch>=3.0,<3.2'")


def test_for_a_target(fxc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "every", lambda cache_dir: iter([]))
    monkeypatch.setattr(machine, "torch_version", lambda: ("2.13.0+cpu", ""))
    monkeypatch.setattr(cuda_sdk, "include_dirs", list)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = fxc("doctor", "--target", "b200", "--json")
    found = {check["name"]: (check["ok"], check["found"], check["mend"]) for check in told.json["checks"]}
    assert list(found) == ["target", "torch for CUDA", "ptxas", "cuobjdump", "CUDA headers", "libcuda stub"]
    assert found["target"] == (True, "NVIDIA B200, sm_100: no binary for it has run yet", "")
    assert found["torch for CUDA"][:2] == (False, "2.13.0+cpu, without CUDA")
    assert found["ptxas"] == (False, "Triton has none", "pip install triton")
    assert found["CUDA headers"][:2] == (False, "no cuda.h, cuda_runtime_api.h, crt/host_defines.h")
    assert not found["libcuda stub"][0]
    assert told.code == 1
    assert fxc("doctor", "--target", "b20").code == 2
    assert fxc("doctor", "--target", "").code == 2
