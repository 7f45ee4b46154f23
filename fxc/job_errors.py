"""What a job that failed means to the person who builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxc.errors import CompileError, FxcError, IncompatibleError, ProofError
from fxc.jobs import Reply

if TYPE_CHECKING:
    from fxc.lower import Unit


def hint_of(error: str, otherwise: str) -> str:
    """What to do about a job that ended with an error; `otherwise` where the error itself does not tell."""
    if "SIGKILL" in error:
        return "memory was short, most likely: use fewer --jobs"
    return otherwise


def failure(unit: Unit, reply: Reply, checking: bool) -> FxcError:
    """The error for a job that failed; its `detail` is what `-v` shows."""
    error: FxcError
    hint: str
    _, _, lacking = reply.error.partition("IncompatibleError: ")
    if lacking and not checking:
        error = IncompatibleError(lacking, "take another torch; with this one `--tuning none` builds")
    elif not checking:
        hint = hint_of(reply.error, "`-v` shows all that the compiler printed")
        error = CompileError(f"{unit.label} does not compile: {reply.error}", hint)
    elif reply.error.startswith("MadeUpError: "):
        what = reply.error.removeprefix("MadeUpError: ")
        error = ProofError(
            f"{unit.label} cannot be compared: eager fails on made-up inputs at {what}",
            "give the inputs `values: [low, high]` that the model has answers to, or build with --no-prove",
        )
    elif reply.error.startswith("ProofError: "):
        hint = "the compiler miscompiles this piece: cut it at an op with partition.splitting_ops, or build with -O0"
        if unit.changed_by:
            off = " ".join(f"--set passes.{name}.enabled=false" for name in unit.changed_by)
            hint = f"a pass or the compiler gets this piece wrong; these tell which: {off}"
        error = ProofError(f"{unit.label} does not equal eager: {reply.error.removeprefix('ProofError: ')}", hint)
    else:
        crashed = "a host compiler that links libstdc++ statically makes such binaries: try CXX=g++"
        hint = crashed if "crashed" in reply.error else "`-v` shows more; where memory is short, use fewer --jobs"
        error = CompileError(f"the binary of {unit.label} does not run: {reply.error}", hint_of(reply.error, hint))
    rewritten = f"after passes:\n{unit.text}\n" if unit.text else ""
    error.add_note(f"piece:\n{unit.piece.text}\n{rewritten}{reply.detail}")
    return error
