"""Files and directories that survive a crash: private modes, fsync, replacement in one step."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fxc.errors import CacheIOError

T = TypeVar("T")

_HINTS = {
    errno.ENOSPC: "free some space there, or choose another place with --cache-dir or FXC_CACHE_DIR",
    errno.EDQUOT: "free some space there, or choose another place with --cache-dir or FXC_CACHE_DIR",
    errno.EROFS: "the file system is read-only: choose another place with --cache-dir or FXC_CACHE_DIR",
}
_HINT = "check the directory's owner and mode, or choose another place with --cache-dir or FXC_CACHE_DIR"
SYNCED = 16
"""Files that are written through at once."""
_OCCUPIED = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
RACES = 20
"""How often others may come first where a directory is put in its place."""
STALE = 3
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}


@contextmanager
def io_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one line: `cannot write /cache/v1: No space left on device`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CacheIOError(f"cannot {action} {path}: {reason}", _HINTS.get(error.errno or 0, _HINT)) from error


def again(read: Callable[[], T]) -> T:
    """`read`'s answer. It is asked again where a network file system says that what it knew of a file is stale: another
    machine has put a new one there."""
    for _ in range(STALE):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return read()


def close(fd: int) -> None:
    """Close what nothing was written through: that it fails, as on a file system that went away, loses nothing."""
    with suppress(OSError):
        os.close(fd)


def make_dirs(path: Path) -> None:
    """Make a directory and its missing parents, 0700 each."""
    if path.is_dir():
        return
    if path.parent != path:
        make_dirs(path.parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not path.is_dir():  # else another process was faster
            raise


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a new file, 0600, through to the disk; without `sync`, the caller sees to that."""
    write_chunks(path, (data,), sync=sync)


def write_chunks(path: Path, chunks: Iterable[bytes], *, sync: bool = True) -> None:
    """The same, piece by piece."""
    with _create(path) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        file.writelines(chunks)
        file.flush()
        if sync:
            os.fsync(fd)


def copy_file(source: Path, path: Path) -> None:
    """Copy into a new file, 0600, through to the disk."""
    with open(source, "rb") as reading, _create(path) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        shutil.copyfileobj(reading, file, 1 << 20)
        file.flush()
        os.fsync(fd)


def link_file(source: Path, path: Path) -> None:
    """Hard-link a file that is on the disk already; copy it where links do not work."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy_file(source, path)


def sync_dir(path: Path) -> None:
    """Write a directory's entries through to the disk."""
    _sync(path)


def sync_all(paths: Iterable[Path]) -> None:
    """Write files, and entries of directories, through to the disk: several at once, which the disk takes together."""
    with ThreadPoolExecutor(SYNCED) as pool:
        for _ in pool.map(_sync, paths):
            pass


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        close(fd)


def install(new: Path, place: Path) -> None:
    """Put the staged directory `new` at `place` in one step, as `replace`, through to the disk."""
    sync_all(Path(directory) for directory, _, _ in os.walk(new))
    replace(new, place)
    sync_dir(place.parent)


def replace(new: Path, place: Path) -> None:
    """The same for what is on the disk already; the caller writes its entry through. In two steps where the file system
    cannot exchange directories. What was there is left in the staging directory. Others may do the same at once, as
    where locks do not reach other machines: whoever comes last is there in the end, and always a whole one."""
    for turn in range(RACES):
        try:
            os.rename(new, place)
            break
        except OSError as error:
            if error.errno not in _OCCUPIED or turn == RACES - 1:
                raise
        if _exchange(new, place):
            break
        with suppress(FileNotFoundError):
            displace(place, new.with_name(f"{new.name}.old{turn}"))


def displace(place: Path, to: Path) -> None:
    """Move a directory away, so that nobody sees half of it. Where it cannot be moved, as one in a lower layer of an
    overlay, it is removed, its own files before its folders: one of them is what makes it count."""
    try:
        os.rename(place, to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        for entry in list(os.scandir(place)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
        shutil.rmtree(place)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories atomically; False where the system or the file system cannot."""
    at_fdcwd, rename_exchange = -100, 2  # <fcntl.h>, <linux/fs.h>
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV, errno.ENOENT}:
        return False
    raise OSError(number, os.strerror(number), str(other))


@contextmanager
def _create(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
