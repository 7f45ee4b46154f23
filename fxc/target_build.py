"""A build for a GPU that is not here, in a child process: what torch is told there stays there.

The child says what it is doing in JSON lines on its stdout, one for each call of an observer, and the last one is the
result or the error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from fxc import errors
from fxc.errors import BuildError, FxcError
from fxc.progress import Observer
from fxc.records import Record

if TYPE_CHECKING:
    from fxc.pipeline import BuildResult, Order


STOPS = 10.0
"""Seconds that the child has to end after a signal."""


class Failure(msgspec.Struct, frozen=True):
    """An FxcError on its way to the parent."""

    kind: str
    message: str
    hint: str
    notes: tuple[str, ...] = ()

    def error(self) -> FxcError:
        cls: type[FxcError] = getattr(errors, self.kind, BuildError)
        error = cls(self.message, self.hint)
        for note in self.notes:
            error.add_note(note)
        return error


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the child's output."""

    call: str = ""
    """Method of the observer."""
    arguments: tuple[str | float | int, ...] = ()
    result: msgspec.Raw = msgspec.Raw()
    failure: Failure | None = None


def build(record: Record, order: Order, observer: Observer) -> BuildResult:
    """`pipeline.build` for the record's GPU.

    Raises:
        FxcError: what the build raised.
        BuildError: the child ended without a word.
    """
    from fxc.pipeline import BuildResult

    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends that one
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with suppress(BrokenPipeError):  # what it says, or its exit code, tells more
            child.stdin.write(msgspec.json.encode((record, order)))
            child.stdin.close()
        for text in child.stdout:
            line = msgspec.json.decode(text, type=Line)
            if line.failure is not None:
                raise line.failure.error()
            if line.result:
                return msgspec.json.decode(line.result, type=BuildResult)
            getattr(observer, line.call)(*line.arguments)
        raise BuildError(f"the build for {record.name} ended unexpectedly with exit code {child.wait()}")
    finally:
        child.terminate()
        try:
            child.wait(timeout=STOPS)
        except subprocess.TimeoutExpired:  # in a call that does not return to Python; its workers die with it
            child.kill()
            child.wait()
        child.stdout.close()


class _Teller(Observer):
    """An observer that writes lines."""

    def __init__(self, out: int) -> None:
        self._out = out

    def write(self, line: Line) -> None:
        os.write(self._out, msgspec.json.encode(line) + b"\n")

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Observer) and not name.startswith("_"):
            return lambda *arguments: self.write(Line(name, arguments))
        return super().__getattribute__(name)


def _serve() -> None:
    """Do what stdin says."""
    from fxc import _worker, pipeline

    _worker.die_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # unwinds, and ends the workers
    teller = _Teller(os.dup(1))
    os.dup2(2, 1)  # what a model prints is no line
    record, order = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[Record, pipeline.Order])
    try:
        result = pipeline.carry_out(order, teller, record=record)
        teller.write(Line(result=msgspec.Raw(msgspec.json.encode(result))))
    except FxcError as error:
        notes = tuple(getattr(error, "__notes__", ()))
        teller.write(Line(failure=Failure(error.kind, error.message, error.hint, notes)))
    except Exception as error:
        message = f"the build failed unexpectedly: {type(error).__name__}: {error}"
        failure = Failure("BuildError", message, "`-v` shows more; please report it", (traceback.format_exc(),))
        teller.write(Line(failure=failure))


if __name__ == "__main__":
    _serve()
    os._exit(0)  # tearing down torch takes a second
