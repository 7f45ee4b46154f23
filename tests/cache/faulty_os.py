"""System calls that fail, lag or lie as those of a network file system do, for what the cache does in this process."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fxc.cache import files

CALLS = ("open", "stat", "lstat", "scandir", "listdir", "mkdir", "rename", "replace", "link", "unlink", "fsync", "close")  # fmt: skip


class FaultyOs:
    """Stands in for some functions of `os`, and for flock; what a test did not plan works as always."""

    def __init__(self, patch: pytest.MonkeyPatch, below: str) -> None:
        """`below`: the folder whose paths are concerned."""
        self.calls: Counter[str] = Counter()
        self._planned: dict[str, list[Any]] = {}
        self._always: dict[str, int] = {}
        self._below = below
        for name in CALLS:
            patch.setattr(os, name, self._faulty(name, getattr(os, name)))
        patch.setattr(io, "open", self._faulty("open", io.open))  # what pathlib calls
        patch.setattr(fcntl, "flock", self._faulty("flock", fcntl.flock))
        patch.setattr(files, "_exchange", self._faulty("exchange", files._exchange))

    def plan(self, call: str, *faults: int) -> None:
        """Numbers of errors for the next calls; 0 for one that works."""
        self._planned[call] = [*faults]

    def always(self, call: str, number: int) -> None:
        """Every call fails so; 0 for none."""
        self._always[call] = number

    def _faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = args[0] if args else "."
            ours = isinstance(place, int) or str(os.fspath(place)).startswith(self._below)
            if not ours:
                return real(*args, **kwargs)
            self.calls[name] += 1
            planned = self._planned.get(name)
            number = planned.pop(0) if planned else self._always.get(name, 0)
            if name == "close" and number:
                real(*args, **kwargs)  # it is closed all the same
            if number:
                raise OSError(number, os.strerror(number), place)
            return real(*args, **kwargs)

        return call


REFUSED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
