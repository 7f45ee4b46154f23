"""A first look at whether builds for a GPU that is not here work at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from fxc.cache import Cache, key
from fxc.errors import CompileError
from fxc.inductor_options import options
from fxc.jobs import CompileJob, Executor, UserOps
from fxc.records import Record
from fxc.target import Target

POINTWISE = """def piece(in_0: "f32[64]"):
    relu = torch.ops.aten.relu.default(in_0)  # f32[64]
    return (relu,)
"""
"""What is compiled first for a GPU that is not here."""


def try_out(
    record: Record, target: Target, version: str, cache: Cache, pool: Executor, stage: Path
) -> None:  # fmt: skip
    """Compile a pointwise piece, before the work that takes long, and see for which device it is; once for each
    device and toolchain.

    Raises:
        CompileError: it does not compile, or there is no machine code for the device in it.
    """
    chosen = options(1, True, target, clock=False)
    told = msgspec.json.encode((record, target)).decode()
    done = cache.scratch("compiler") / f"{key.combine([('lower', version), ('target', told)])}.tried"
    if done.exists():
        return
    directory = stage / "tried"
    directory.mkdir()
    job = CompileJob(
        id=-1, label="a pointwise piece", text=POINTWISE, dims={}, target=target, options=chosen, ops=UserOps(),
        directory=str(directory), scratch=str(cache.scratch("compiler")), fast=False, record=record,
    )  # fmt: skip
    pool.send(job)
    reply = pool.receive()
    if reply.result is None or not reply.result["kernels"]:
        reason = reply.error or "it has no machine code"
        error = CompileError(
            f"a piece for {record.name}, {record.arch}, cannot be compiled here: {reason}",
            f"`fxc doctor --target` tells what is missing; if nothing, Triton here does not know {record.arch}",
        )
        error.add_note(reply.detail)
        raise error
    with suppress(OSError):
        done.touch()
