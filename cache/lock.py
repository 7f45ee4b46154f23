"""Locks and staging directories that a dead process cannot hold.

Both rest on flock, which the kernel lets go of when the last descriptor of a process is closed, however it ended.
(A lock that rests on the existence of a file, which lock libraries fall back to, would outlive a killed process; and a
process id says nothing in another container.)

On a network file system a lock may not reach other machines, or there may be none at all. Locks save work and keep
`prune` from what is used; that readers see nothing but whole artifacts rests on renames alone. So without locks all but
`prune` goes on, and a staging directory of another machine counts as used for a day, whatever its lock says.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from fxc.cache.files import again, close, io_errors
from fxc.cache.layout import Layout
from fxc.errors import CacheIOError

ALIVE = ".alive"
DAY = 86400.0
_REFUSED = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
"""What flock says where there are no locks."""

PULLING = "pulling"
"""Held while something is fetched into `incoming/`."""
BUILDING = "building"
"""Shared by everything that uses binaries which no artifact refers to yet."""


def use_of(hash: str) -> str:
    """Name of the lock that whoever uses an artifact shares, and who removes it holds alone."""
    return f"use.{hash}"


@contextmanager
def lock(layout: Layout, name: str) -> Iterator[None]:
    """Hold the lock `name` alone among threads and processes; waits for it."""
    with _held(layout, name, fcntl.LOCK_EX):
        yield


@contextmanager
def try_lock(layout: Layout, name: str) -> Iterator[bool]:
    """Hold the lock `name` if nobody else does; says whether it is held."""
    with _held(layout, name, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
        yield held


@contextmanager
def turn(layout: Layout, name: str, seconds: float, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock `name` as soon as it is free; go on without it after so many seconds, or where nothing can be
    locked. Says whether it was waited for, and calls `waiting` once when it is."""
    end, waited = time.monotonic() + seconds, False
    while True:
        with ExitStack() as stack:
            try:
                held = stack.enter_context(try_lock(layout, name))
            except CacheIOError:
                held = True
            if held or time.monotonic() >= end:
                yield waited
                return
        if not waited:
            waiting()
        waited = True
        time.sleep(min(0.2, max(0.0, end - time.monotonic())))


@contextmanager
def share(layout: Layout, name: str) -> Iterator[None]:
    """Share the lock `name` with others that share it; waits for who holds it alone."""
    with _held(layout, name, fcntl.LOCK_SH):
        yield


@contextmanager
def _held(layout: Layout, name: str, how: int) -> Iterator[bool]:
    path = layout.lock(name)
    with io_errors("lock", path):
        layout.prepare()
        fd = _flock(path, os.O_RDWR | os.O_CREAT, how)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            close(fd)


def locks_work(layout: Layout) -> bool:
    """Whether the file system has locks at all."""
    path = layout.lock("staging")
    with io_errors("lock", path):
        layout.prepare()
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _REFUSED
        finally:
            close(fd)
    return True


def _flock(path: Path, flags: int, how: int) -> int | None:
    """A descriptor through which the lock is held, as far as there are locks; None where it is not to be waited for.
    Tried again where `prune` removed the file meanwhile: others would lock another one of that name."""
    while True:
        fd = again(lambda: os.open(path, flags, 0o600))
        try:
            fcntl.flock(fd, how)
            if again(partial(_is_at, fd, path)):
                return fd
        except BlockingIOError:
            close(fd)
            return None
        except OSError as error:
            if error.errno in _REFUSED:
                return fd
            close(fd)
            raise
        except BaseException:
            close(fd)
            raise
        close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


class Use:
    """Keeps an artifact from being pruned until it is closed or forgotten, or the process ends."""

    def __init__(self, artifact: Path) -> None:
        """Reads, never writes: publishing has made the lock's file. Where there is none, as beside a copy of an
        artifact, or where locks are refused, nothing is held: whoever prunes must not reach there."""
        self._fd: int | None = None
        place = Path(os.path.realpath(artifact))
        with suppress(OSError):
            path = Layout(place.parent.parent).lock(use_of(place.name))
            self._fd = _flock(path, os.O_RDONLY, fcntl.LOCK_SH)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            close(fd)

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@contextmanager
def staging(layout: Layout) -> Iterator[Path]:
    """A private directory on the cache's own file system; removed afterwards, as are those of dead processes."""
    with lock(layout, "staging"), io_errors("write", layout.staging):
        for left in leftovers(layout):  # under the lock: sees no directory whose `.alive` is not held yet
            _remove(left, _alive(left))
        path = layout.staging / secrets.token_hex(8)
        fd = os.open(_alive(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with _unless_refused():
                fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, _kernel())
            os.mkdir(path, 0o700)
        except BaseException:
            _remove(path, _alive(path))
            close(fd)
            raise
    try:
        yield path
    finally:
        _remove(path, _alive(path))
        close(fd)


def leftovers(layout: Layout) -> list[Path]:
    """Staging directories whose process is dead. Called under the lock `staging`."""
    names = {entry.name.removesuffix(ALIVE) for entry in layout.staging.iterdir()}
    return [layout.staging / name for name in sorted(names) if _is_dead(layout.staging / name)]


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(_alive(path), os.O_RDWR)
    except FileNotFoundError:  # killed before it was made, or after it was removed
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elsewhere = os.read(fd, 100) not in (b"", _kernel())
        return not elsewhere or time.time() - os.fstat(fd).st_mtime > DAY
    except OSError:
        return False
    finally:
        close(fd)


@cache
def _kernel() -> bytes:
    """Which one runs: the same in all containers of a machine, which share its locks; another one after a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return os.uname().nodename.encode()


@contextmanager
def _unless_refused() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise


def _alive(path: Path) -> Path:
    return path.with_name(path.name + ALIVE)


def _remove(path: Path, alive: Path) -> None:
    for pause in (0.0, 0.01, 0.1, 0.5):  # a compiler that was just killed may still end a write there
        time.sleep(pause)
        with suppress(OSError):
            shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            break
    with suppress(OSError):
        alive.unlink()
