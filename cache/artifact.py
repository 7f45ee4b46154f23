"""Reading an artifact: any directory with a manifest.json, in the cache or not, writable or not."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

import msgspec

from fxc.cache import key
from fxc.cache.files import again, io_errors
from fxc.cache.layout import MANIFEST, SIGNATURE
from fxc.cache.lock import Use
from fxc.errors import CacheMissError, DamagedError, FxcError, IncompatibleError, UntrustedError
from fxc.manifest import FORMAT, File, Manifest, decode, decode_sealed

MEND = "run `fxc build` again: it mends the artifact"
PAUSES = (0.0, 0.05, 0.2)
"""Seconds before what is missing is looked for again: it may be about to be replaced where that takes two steps, or be
on its way to this machine. What is altered is read again, too, but not waited for."""
T = TypeVar("T")
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
"""What the system says where there is no such file, or can be none."""


class Checks(Protocol):
    """What is asked of an artifact before it is used: `trust.Trust`."""

    @property
    def keys(self) -> tuple[Path, ...]: ...

    def check(self, artifact: Artifact) -> Artifact: ...


class Artifact(msgspec.Struct, frozen=True):
    """An artifact as it was when it was opened."""

    path: Path
    manifest: Manifest
    data: bytes
    """Those of manifest.json."""
    signature: bytes = b""
    """Those of manifest.sig, if it is there."""
    trust: Checks | None = None
    """What it was checked by, as is what takes its place."""

    @classmethod
    def open(cls, path: Path) -> Artifact:
        """Open a directory that holds an artifact.

        Raises:
            CacheMissError: not an artifact.
            DamagedError: manifest.json is damaged.
        """
        where = path / MANIFEST
        absent = CacheMissError(
            f"{path} is not an artifact: it has no {MANIFEST}", "`fxc ls` lists what there is, `fxc build` makes it"
        )
        with reading(where, absent):
            data = again(where.read_bytes)
        check_format(data, where)
        manifest = decode(data, str(where))
        return cls(path, manifest, data, _signature(path / SIGNATURE))

    def rank_dir(self, rank: int = 0, data_parallel_rank: int = 0) -> str:
        """Name of a rank's directory."""
        name = f"rank_{rank}_{data_parallel_rank}"
        if name not in self.manifest.ranks:
            there = ", ".join(sorted(self.manifest.ranks)) or "none"
            raise CacheMissError(
                f"artifact {self.manifest.hash} has no {name}; its ranks are: {there}",
                f"build it with --rank {rank} --dp-rank {data_parallel_rank}",
            )
        return name

    def use(self) -> Use:
        """Keep it from being pruned from now on.

        Raises:
            CacheMissError: it was pruned before.
        """
        use = Use(self.path)
        if not (self.path / MANIFEST).is_file():
            use.close()
            raise CacheMissError(f"artifact {self.manifest.hash} was removed just now", "run `fxc build` again")
        return use

    def read(self, name: str) -> bytes:
        """The bytes of a listed file, `rank_0_0/transformed_code.py`: the very ones that were checked.

        Raises:
            DamagedError: the file is missing or altered.
        """
        return self._intact(name, _checked_bytes)

    @property
    def must_be_signed(self) -> bool:
        """Whether a signature was asked for: where it lies is not trusted."""
        return self.trust is not None and bool(self.trust.keys)

    def files_of(self, library: str) -> list[str]:
        """Listed names of a binary: `rank_0_0/inductor/<key>.so` itself and, if it calls ops, the `.json` beside it."""
        listed = self.manifest.ranks[library.partition("/")[0]].files
        calls = f"{library.removesuffix('.so')}.json"
        return [library, calls] if calls in listed else [library]

    def verify(self, rank_dir: str | None = None) -> int:
        """Check every listed file, of one rank or of all. Returns their number."""
        ranks = self.manifest.ranks if rank_dir is None else {rank_dir: self.manifest.ranks[rank_dir]}
        names = [name for rank in ranks.values() for name in rank.files]
        for name in names:
            self._intact(name, check_file)
        return len(names)

    def _intact(self, name: str, reader: Callable[[Path, File], T]) -> T:
        """`reader`'s answer. A file that differs because the artifact was built again meanwhile is not damaged."""
        rank = self.manifest.ranks.get(name.partition("/")[0])
        expected = rank.files.get(name) if rank else None
        if expected is None or not is_safe(name):
            raise DamagedError(f"{self.path / MANIFEST} lists no file {name}", MEND)
        damage = _missing(self.path / name)
        for pause in PAUSES:
            try:
                return reader(self.path / name, expected)
            except DamagedError as error:
                damage = error
            if not (self.path / name).exists():
                time.sleep(pause)
            try:
                now = Artifact.open(self.path)
                now = self.trust.check(now) if self.trust else now
            except UntrustedError:
                raise
            except FxcError:
                continue
            if now.manifest != self.manifest:
                return now._intact(name, reader)
        raise damage


def _signature(path: Path) -> bytes:
    with io_errors("read", path), suppress(FileNotFoundError):
        return again(path.read_bytes)
    return b""


def is_safe(name: str) -> bool:
    """Whether a listed name stays inside its directory, and is written as plainly as it can be."""
    path = PurePosixPath(name)
    plain = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    return plain and str(path) == name


def check_file(path: Path, expected: File) -> None:
    """Compare a file's size and digest.

    Raises:
        DamagedError: missing or altered.
    """
    with reading(path, _missing(path)):
        _check_size(path, expected, again(path.stat).st_size)
        found = again(lambda: key.sha256_file(path))
    _check_digest(path, expected, found)


@contextmanager
def reading(path: Path, absent: FxcError) -> Iterator[None]:
    """Turn an OSError into one line; raise `absent` where there is no such file."""
    with io_errors("read", path):
        try:
            yield
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            raise absent from None


def _checked_bytes(path: Path, expected: File) -> bytes:
    with reading(path, _missing(path)):
        _check_size(path, expected, again(path.stat).st_size)
        data = again(path.read_bytes)
    _check_digest(path, expected, key.sha256(data))
    return data


def _missing(path: Path) -> DamagedError:
    return DamagedError(f"{path} is missing", MEND)


def _check_size(path: Path, expected: File, size: int) -> None:
    if size != expected.bytes:
        raise DamagedError(f"{path} is damaged: it has {size} bytes, expected {expected.bytes}", MEND)


def _check_digest(path: Path, expected: File, found: str) -> None:
    if found != expected.sha256:
        raise DamagedError(f"{path} is damaged: its sha256 is {found}, expected {expected.sha256}", MEND)


class _Format(msgspec.Struct):
    format: int


def check_format(data: bytes, where: Path) -> None:
    """Another version of fxc may have written other fields: say that, not that they are unknown. A number that was
    altered is for `decode` to tell."""
    try:
        found = decode_sealed(data, _Format, str(where), MEND).format
    except DamagedError:
        return
    if found != FORMAT:
        raise IncompatibleError(f"{where} has format {found}, this fxc reads {FORMAT}", "build it with this version")
