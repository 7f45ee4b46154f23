"""A file that an option names: `-` is stdout, anything else is written in one step."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fxc.cli import streams
from fxc.errors import FxcError, UsageError

STDOUT = Path("-")


def check(file: Path, option: str) -> None:
    """Refuse what cannot be a file, before the work is done.

    Raises:
        UsageError: names the option.
    """
    if file == STDOUT:
        return
    if file.is_dir():
        raise UsageError(f"{option} {file} is a directory", "name a file in it")
    if not file.resolve().parent.is_dir():
        raise UsageError(f"{option} {file}: there is no directory {file.parent}", "make it first")


def write(file: Path, text: str, option: str, hint: str = "") -> None:
    """Write it all, or leave what was there: a link stays one, and so does a device or a pipe.

    Raises:
        FxcError: it cannot be written; names the option, with the hint.
    """
    if file == STDOUT:
        streams.write(text)
        return
    place = file.resolve()
    part = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if place.exists() and not place.is_file():
            place.write_text(text, encoding="utf-8")
            return
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, place)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise FxcError(f"{option} {file} cannot be written: {error.strerror}", hint) from error
