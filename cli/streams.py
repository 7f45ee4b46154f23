"""The process's standard streams: stdout is for the result alone, and must not fail half-way unnoticed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress

from fxc.errors import FxcError


def fill() -> None:
    """Open what was closed (`fxc build model.yaml >&-`) on nothing: else the next file opened would be stdout."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def write(text: str) -> None:
    """Write to stdout, all the way.

    Raises:
        BrokenPipeError: the reader left.
        FxcError: it cannot be written, a file on a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise FxcError(f"cannot write the result to stdout: {error.strerror}") from error


def drop() -> None:
    """Flush stdout, and point it at nothing where that fails, so that the interpreter's last flush is quiet."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)


@contextmanager
def result_only() -> Iterator[None]:
    """Inside the block, what anyone prints to stdout (a model's code, a library, a child process) goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)
