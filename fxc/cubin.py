"""What a compiled kernel takes of a multiprocessor, read from its cubin by NVIDIA's tool, which Triton brings along."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from fxc.errors import CompileError


class Usage(NamedTuple):
    """Of one kernel."""

    name: str
    arch: str
    """`sm_90`, `sm_90a`"""
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread: registers that were spilled, and arrays."""
    shared: int
    """Bytes of a block, without what is asked for at the launch."""


def usage(cubin: Path) -> list[Usage]:
    """Every kernel in a cubin.

    Raises:
        CompileError: there is no tool, or it cannot read the file.
    """
    listed = _cuobjdump("--dump-resource-usage", cubin)
    found = _KERNEL.findall(listed)
    arch = re.search(r"\bsm_\w+", _cuobjdump("--list-elf", cubin)) if found else None
    if not found or arch is None:
        raise CompileError(f"cuobjdump finds no kernel in {cubin}: {listed.strip()[:200]}")
    numbers = [(name, dict(_NUMBER.findall(rest))) for name, rest in found]
    return [
        Usage(name, arch[0], int(got["REG"]), int(got["STACK"]) + int(got["LOCAL"]), int(got["SHARED"]))
        for name, got in numbers
    ]


_KERNEL = re.compile(r"Function (\S+):\s*\n\s*(.*)")
_NUMBER = re.compile(r"\b([A-Z]+):(\d+)")


def _cuobjdump(option: str, cubin: Path) -> str:
    tool = tool_path()
    done = subprocess.run([tool, option, str(cubin)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def tool_path() -> str:
    """Path of cuobjdump.

    Raises:
        CompileError: Triton is not installed, or has none.
    """
    try:
        from triton import knobs

        return str(knobs.nvidia.cuobjdump.path)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise CompileError(
            f"there is no cuobjdump: {error}", "pip install 'fxc[cuda]': Triton brings it along"
        ) from None
