"""The cache: the one object that everything else asks."""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path

import msgspec

from fxc.cache import binaries as _binaries
from fxc.cache import index, publish
from fxc.cache.artifact import Artifact
from fxc.cache.files import io_errors, make_dirs
from fxc.cache.layout import MANIFEST, Layout, cache_dir
from fxc.cache.lock import lock, staging, try_lock
from fxc.errors import CacheMissError, DamagedError, FxcError, UsageError
from fxc.manifest import FORMAT, Binary, Manifest, Source

SHORTEST = 4
"""Hex digits that a shortened hash needs."""


class Summary(msgspec.Struct, frozen=True):
    """A line of `fxc ls`."""

    hash: str
    manifest: Manifest | None
    """None where it is damaged."""
    bytes: int
    created: float
    """Seconds since the epoch."""
    last_used: float


class Cache(msgspec.Struct, frozen=True):
    """A cache directory. Reading takes no lock and writes nothing, so that it may be mounted read-only."""

    layout: Layout

    @classmethod
    def open(cls, directory: Path | None = None, environ: Mapping[str, str] | None = None) -> Cache:
        """The cache at `directory`, else at FXC_CACHE_DIR, else in the user's cache folder. Creates nothing."""
        where = cache_dir(directory, os.environ if environ is None else environ)
        return cls(Layout(where / f"v{FORMAT}"))

    @property
    def root(self) -> Path:
        return self.layout.root

    # Artifacts

    def resolve(self, prefix: str) -> str:
        """The hash that begins with `prefix`.

        Raises:
            UsageError: too short, or no hash at all.
            CacheMissError: none or several begin so.
        """
        prefix = prefix.lower()
        if not re.fullmatch(r"[0-9a-f]+", prefix):
            raise UsageError(f"{prefix!r} is not a hash: expected hexadecimal digits", "`fxc ls` lists the hashes")
        if len(prefix) < SHORTEST:
            raise UsageError(f"{prefix!r} is too short: expected at least {SHORTEST} digits of the hash")
        found = [name for name in self._hashes() if name.startswith(prefix)]
        if not found:
            raise CacheMissError(f"no artifact {prefix} in {self.root}", "`fxc ls` lists what there is")
        if len(found) > 1:
            raise CacheMissError(f"{prefix} is ambiguous: it begins {', '.join(found)}", "give more digits")
        return found[0]

    def artifact(self, hash: str) -> Artifact:
        """Open an artifact by its full hash.

        Raises:
            CacheMissError: it is not there.
            DamagedError: its manifest is damaged.
        """
        artifact = Artifact.open(self.layout.artifacts / hash)
        if artifact.manifest.hash != hash:
            raise DamagedError(
                f"{artifact.path / MANIFEST} is of artifact {artifact.manifest.hash}", "remove the directory"
            )
        return artifact

    def publish(
        self,
        manifest: Manifest,
        rank_dir: str,
        files: Mapping[str, bytes | Path],
        binaries: Iterable[str],
        *,
        world_size: int = 1,
    ) -> Artifact:
        """Make an artifact, or add, mend or replace a rank of it. Readers see all of it or nothing.

        Args:
            manifest: its `ranks` are filled in here.
            rank_dir: `rank_<r>_<d>`.
            files: by name inside the rank's directory; contents or files to copy.
            binaries: keys of stored binaries, which get linked into `<rank_dir>/inductor/`.
            world_size: number of ranks in the job.
        """
        return publish.publish(self.layout, manifest, rank_dir, files, binaries, world_size)

    def list(self) -> builtins.list[Summary]:
        """Every artifact, by hash."""
        found = (self._summary(name) for name in self._hashes())
        return [summary for summary in found if summary is not None]

    def touch(self, hash: str) -> None:
        """Note that an artifact is used now, where that can be written."""
        with suppress(OSError):
            os.utime(self.layout.artifacts / hash / MANIFEST)

    # Binaries

    def binary(self, key: str) -> Binary | None:
        """The record of a compiled piece whose files are all intact. A damaged one is removed."""
        return _binaries.find(self.layout, key)

    def binary_files(self, key: str) -> builtins.list[Path]:
        """Its files: `<key>.so` and, where it calls custom ops, `<key>.json`."""
        return [self.layout.binaries / key / name for name in sorted(_binaries.load(self.layout, key).files)]

    def store_binary(self, key: str, files: Mapping[str, Path], record: Binary, *, force: bool = False) -> None:
        """Copy a compiled piece into the cache. An intact one that is there already stays, unless `force`.

        Args:
            files: by name, `<key>.so` and maybe `<key>.json`.
            record: its `sha256` is that of `<key>.so`.
        """
        if not {f"{key}.so"} <= set(files) <= {f"{key}.so", f"{key}.json"}:
            raise UsageError(f"binary {key}: expected {key}.so and maybe {key}.json, got {', '.join(files)}")
        _binaries.store(self.layout, key, files, record, force)

    # Direct keys

    def lookup(self, direct_key: str, digest_of: Callable[[Source], str | None]) -> str | None:
        """Hash of the artifact that a direct key stands for while its source files are what they were."""
        return index.lookup(self.layout, direct_key, digest_of)

    def remember(self, direct_key: str, hash: str, sources: Iterable[Source]) -> None:
        """Note what a direct key stands for."""
        index.remember(self.layout, direct_key, hash, sources)

    # Places to work in

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Held by one at a time; let go of when the process ends, however it ends. Not reentrant.

        `artifacts`, `binaries`, `index` and `staging` are the cache's own.
        """
        return lock(self.layout, name)

    def try_lock(self, name: str) -> AbstractContextManager[bool]:
        """The same lock, but not waited for: gives whether it is held."""
        return try_lock(self.layout, name)

    def staging(self) -> AbstractContextManager[Path]:
        """A private directory on the cache's file system, removed afterwards."""
        return staging(self.layout)

    def scratch(self, name: str) -> Path:
        """A lasting directory for a compiler's own cache."""
        path = self.layout.scratch / name
        with io_errors("write", path):
            make_dirs(path)
        return path

    def _hashes(self) -> builtins.list[str]:
        with io_errors("read", self.layout.artifacts):
            try:
                names = os.listdir(self.layout.artifacts)
            except FileNotFoundError:
                return []
            return sorted(name for name in names if (self.layout.artifacts / name / MANIFEST).is_file())

    def _summary(self, hash: str) -> Summary | None:
        path = self.layout.artifacts / hash
        with io_errors("read", path):
            try:
                status = (path / MANIFEST).stat()
                files = [file.stat() for file in path.rglob("*") if file.is_file()]
            except FileNotFoundError:  # removed or replaced meanwhile
                return None
        try:
            manifest = Artifact.open(path).manifest
        except FxcError:
            manifest = None
        size = sum({file.st_ino: file.st_size for file in files}.values())
        return Summary(hash, manifest, size, _seconds(manifest, status.st_ctime), status.st_mtime)


def _seconds(manifest: Manifest | None, otherwise: float) -> float:
    if manifest is not None:
        with suppress(ValueError):
            return datetime.fromisoformat(manifest.created).timestamp()
    return otherwise
