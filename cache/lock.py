"""Locks and staging directories that a dead process cannot hold.

Both rest on flock, which the kernel lets go of when the last descriptor of a process is closed, however it ended.
(A lock that rests on the existence of a file, which lock libraries fall back to, would outlive a killed process; and a
process id says nothing in another container.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fxc.cache.files import io_errors
from fxc.cache.layout import Layout

ALIVE = ".alive"


@contextmanager
def lock(layout: Layout, name: str) -> Iterator[None]:
    """Hold the lock `name` alone among threads and processes; waits for it."""
    with _opened(layout, name) as fd:
        with io_errors("lock", layout.lock(name)):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


@contextmanager
def try_lock(layout: Layout, name: str) -> Iterator[bool]:
    """Hold the lock `name` if nobody else does; says whether it is held."""
    with _opened(layout, name) as fd:
        held = True
        with io_errors("lock", layout.lock(name)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = False
        yield held


@contextmanager
def _opened(layout: Layout, name: str) -> Iterator[int]:
    """The lock's file; closing it lets go."""
    with io_errors("lock", layout.lock(name)):
        layout.prepare()
        fd = os.open(layout.lock(name), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def staging(layout: Layout) -> Iterator[Path]:
    """A private directory on the cache's own file system; removed afterwards, as are those of dead processes."""
    with lock(layout, "staging"), io_errors("write", layout.staging):
        _sweep(layout.staging)  # under the lock: sees no directory whose `.alive` is not held yet
        path = Path(tempfile.mkdtemp(dir=layout.staging))
        alive = path.with_name(path.name + ALIVE)
        fd = os.open(alive, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        _remove(path, alive)
        os.close(fd)


def _sweep(directory: Path) -> None:
    """Remove staging directories whose process is dead. Called under the lock `staging`."""
    for name in {entry.name.removesuffix(ALIVE) for entry in directory.iterdir()}:
        path, alive = directory / name, directory / (name + ALIVE)
        try:
            fd = os.open(alive, os.O_RDWR)
        except FileNotFoundError:  # killed before it was made, or after it was removed
            _remove(path, alive)
            continue
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path, alive)
        except OSError:  # alive
            continue
        finally:
            os.close(fd)


def _remove(path: Path, alive: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        alive.unlink()
