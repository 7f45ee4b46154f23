"""Kernels of a binary, as the manifest lists them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fxc import cubin
from fxc.errors import CompileError
from fxc.target import Target


class Compiled(NamedTuple):
    """A kernel as Inductor has put it into a binary."""

    name: str
    cubin: Path
    warps: int
    shared: int
    """Bytes of shared memory that a launch asks for."""
    chosen: str
    """What decided on its configuration: rules, tuned, clock or unknown."""
    hash: str = ""
    """What a tuning record calls it."""


def describe(kernels: Iterable[Compiled], target: Target) -> list[dict[str, Any]]:
    """What each takes of a multiprocessor, as fields of `Kernel`.

    Raises:
        CompileError: machine code is for another device than `target`.
    """
    found = []
    for kernel in kernels:
        usage = next((entry for entry in cubin.usage(kernel.cubin) if entry.name == kernel.name), None)
        if usage is None:
            raise CompileError(f"the cubin of {kernel.name} does not have that kernel")
        require_arch(usage, target)
        found.append(
            {
                "name": kernel.name,
                "arch": usage.arch,
                "registers": usage.registers,
                "stack": usage.stack,
                "shared": usage.shared + kernel.shared,
                "warps": kernel.warps,
                "chosen": kernel.chosen,
                "hash": kernel.hash,
            }
        )
    return found


def require_arch(usage: cubin.Usage, target: Target) -> None:
    """Refuse machine code for another device; `sm_90a` is `sm_90` with what only that has.

    Raises:
        CompileError: names both.
    """
    wanted = "sm_{}{}".format(*target.compute_capability or (0, 0))
    if usage.arch.rstrip("af") != wanted:
        raise CompileError(f"the machine code of {usage.name} is for {usage.arch}, expected {wanted}")
