"""What is read of kernels, with the tool's words as they are; that it works on real ones is for tests/virtual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxc import cubin, kernels
from fxc.errors import CompileError
from fxc.kernels import Compiled
from fxc.target import Target

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function attend:
  REG:128 STACK:24 SHARED:1024 LOCAL:0 CONSTANT[0]:640 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function merge:
  REG:32 STACK:0 SHARED:0 LOCAL:8 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
H200 = Target("cuda", "x86_64", (), "2.11.0+cu130", compute_capability=(9, 0))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    said = {"--dump-resource-usage": USAGE, "--list-elf": "ELF file    1: some.sm_90a.cubin\n"}
    monkeypatch.setattr(cubin, "_cuobjdump", lambda option, cubin: said[option])
    return said


@pytest.mark.usefixtures("tool")
def test_usage() -> None:
    assert cubin.usage(Path("some.cubin")) == [
        ("attend", "sm_90a", 128, 24, 1024), ("merge", "sm_90a", 32, 8, 0),
    ]  # fmt: skip


def test_a_file_without_kernels(tool: dict[str, str]) -> None:
    tool["--dump-resource-usage"] = "cuobjdump fatal   : File 'some.cubin' does not contain device code\n"
    with pytest.raises(CompileError, match="finds no kernel in some.cubin: cuobjdump fatal"):
        cubin.usage(Path("some.cubin"))


@pytest.mark.usefixtures("tool")
def test_described() -> None:
    compiled = [Compiled("attend", Path("some.cubin"), warps=8, shared=65536, chosen="rules")]
    found: list[dict[str, Any]] = kernels.describe(compiled, H200)
    assert found == [
        {
            "name": "attend", "arch": "sm_90a", "registers": 128, "stack": 24, "shared": 66560, "warps": 8,
            "chosen": "rules", "hash": "",
        }
    ]  # fmt: skip


def test_machine_code_for_another_device(tool: dict[str, str]) -> None:
    tool["--list-elf"] = "ELF file    1: some.sm_80.cubin\n"
    with pytest.raises(CompileError, match="the machine code of attend is for sm_80, expected sm_90"):
        kernels.describe([Compiled("attend", Path("some.cubin"), 8, 0, "rules")], H200)


@pytest.mark.usefixtures("tool")
def test_another_kernel() -> None:
    with pytest.raises(CompileError, match="the cubin of other does not have that kernel"):
        kernels.describe([Compiled("other", Path("some.cubin"), 8, 0, "rules")], H200)
