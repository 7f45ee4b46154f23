"""The cache: the one object that everything else asks."""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

import msgspec

from fxc.cache import archive, index, prune, publish, pull, tuning
from fxc.cache import binaries as _binaries
from fxc.cache.artifact import Artifact
from fxc.cache.choice import Rules
from fxc.cache.contents import Progress
from fxc.cache.files import again, io_errors, make_dirs
from fxc.cache.layout import MANIFEST, Layout, base_dirs, cache_dir
from fxc.cache.lock import BUILDING, Use, lock, share, staging, try_lock, turn
from fxc.cache.prune import Pruned
from fxc.cache.remote import Remote
from fxc.cache.trust import Trust, check, check_cache
from fxc.errors import CacheIOError, CacheMissError, DamagedError, FxcError, IncompatibleError, UsageError
from fxc.manifest import FORMAT, Binary, Factor, File, Manifest, Source

SHORTEST = 4
"""Hex digits that a shortened hash needs."""
DIGITS = 32
"""Of a whole one, which is looked for by its name: a listing of many is slow, and may lag behind over a network."""


class Summary(msgspec.Struct, frozen=True):
    """A line of `fxc ls`."""

    hash: str
    manifest: Manifest | None
    """None where it is damaged."""
    bytes: int
    created: float
    """Seconds since the epoch."""
    last_used: float
    path: str
    read_only: bool
    """Whether it lies in a place of FXC_CACHE_PATH."""


class Cache(msgspec.Struct, frozen=True):
    """A cache directory, and read-only places that are searched after it. Reading takes no lock and writes nothing, so
    that it may be mounted read-only."""

    layout: Layout
    bases: tuple[Layout, ...] = ()
    """Never written."""

    @classmethod
    def open(cls, directory: Path | None = None, environ: Mapping[str, str] | None = None) -> Cache:
        """The cache at `directory`, else at FXC_CACHE_DIR, else in the user's cache folder, over the places in
        FXC_CACHE_PATH. Creates nothing.

        Raises:
            UntrustedError: others own or may write one of them.
        """
        environ = os.environ if environ is None else environ
        where = cache_dir(directory, environ)
        bases = [Layout(path / f"v{FORMAT}") for path in base_dirs(environ) if path != where]
        cache = cls(Layout(where / f"v{FORMAT}"), tuple(bases))
        for layout in cache.layouts:
            check_cache(layout, Trust.unsigned(environ))
        return cache

    @property
    def root(self) -> Path:
        return self.layout.root

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All places, in the order in which they are searched."""
        return (self.layout, *self.bases)

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
        whole = len(prefix) == DIGITS and any(index.has_artifact(layout, prefix) for layout in self.layouts)
        found = [prefix] if whole else self._hashes(prefix)
        if not found:
            places = ", ".join(str(layout.root) for layout in self.layouts)
            raise CacheMissError(f"no artifact {prefix} in {places}", "`fxc ls` lists what there is")
        if len(found) > 1:
            raise CacheMissError(f"{prefix} is ambiguous: it begins {', '.join(found)}", "give more digits")
        return found[0]

    def artifact(self, hash: str) -> Artifact:
        """Open an artifact by its full hash, in the first place where its manifest can be read.

        Raises:
            CacheMissError: it is not there.
            DamagedError: its manifest is damaged.
            IncompatibleError: another version of fxc made it.
        """
        wrong: FxcError | None = None
        for layout in self.layouts:
            if layout is not self.layout and not index.has_artifact(layout, hash):
                continue
            try:
                return _open(layout, hash)
            except (CacheMissError, DamagedError, IncompatibleError) as error:
                wrong = error if wrong is None or isinstance(wrong, CacheMissError) else wrong
        assert wrong is not None
        raise wrong

    def publish(
        self,
        manifest: Manifest,
        rank_dir: str,
        files: Mapping[str, bytes | Path],
        binaries: Iterable[str],
        *,
        world_size: int = 1,
        direct: Sequence[Factor] = (),
    ) -> Artifact:
        """Make an artifact, or add, mend or replace a rank of it. Readers see all of it or nothing.

        Args:
            manifest: its `ranks` are filled in here.
            rank_dir: `rank_<r>_<d>`.
            files: by name inside the rank's directory; contents or files to copy.
            binaries: keys of stored binaries, which get linked into `<rank_dir>/inductor/`.
            world_size: number of ranks in the job.
            direct: what the direct key digests.
        """
        rank = publish.new_rank(rank_dir, world_size, direct)
        return publish.publish(self.layout, self.bases, manifest, rank, files, binaries)

    def export(self, artifact: Artifact, file: Path) -> File:
        """Write an artifact into one file, the same bytes for the same artifact. Gives its size and digest."""
        return archive.export(artifact, file)

    def import_file(self, file: Path, trust: Trust) -> Artifact:
        """Take in what `export` has written, after every digest was checked, and the signature if `trust` asks for one.

        Raises:
            DamagedError: it is not that, or was altered.
        """
        with self.building(), staging(self.layout) as stage:
            return publish.adopt(self.layout, check(archive.unpack(file, stage), trust), stage)

    def pull(self, remote: Remote, found: Artifact, trust: Trust, progress: Progress) -> Artifact:
        """Take in an artifact from a remote cache, after every digest was checked, and the signature if `trust` asks
        for one. `progress` is told of bytes that have come.

        Args:
            found: what `Remote.manifest` gives.

        Raises:
            DamagedError: something is not what its digest says.
            CacheIOError: the remote cannot be read.
        """
        with self.building():
            return pull.pull(self.layout, remote, found, trust, progress)

    def sign(self, artifact: Artifact, key: Path) -> Artifact:
        """Sign an artifact's manifest. A rank that is added later takes the signature away."""
        inside = artifact.path.parent == self.layout.artifacts
        if not inside:
            raise UsageError(f"{artifact.path} is not in the cache {self.root}", "`fxc import` or --cache-dir")
        with staging(self.layout) as stage, lock(self.layout, "artifacts"):
            return publish.sign(artifact, key, stage)

    def amend(self, artifact: Artifact, manifest: Manifest) -> Artifact:
        """Replace what an artifact's manifest says of its files, which stay. That takes a signature away.

        Raises:
            UsageError: it is not in this cache.
        """
        if artifact.path.parent != self.layout.artifacts:
            raise UsageError(f"{artifact.path} is not in the cache {self.root}", "`fxc import` or --cache-dir")
        with staging(self.layout) as stage, lock(self.layout, "artifacts"):
            return publish.amend(artifact, manifest, stage)

    def use(self, hash: str) -> Use:
        """Keep an artifact, if it is there, from being pruned until that is closed."""
        there = (layout.artifacts / hash for layout in self.layouts if index.has_artifact(layout, hash))
        return Use(next(there, self.layout.artifacts / hash))

    def prune(self, rules: Rules, *, dry_run: bool = False) -> Pruned:
        """Remove what `rules` choose, and what nothing refers to. Read-only places are left alone."""
        return prune.prune(self.layout, self.bases, rules, dry_run)

    def list(self) -> builtins.list[Summary]:
        """Every artifact, by hash; of one that is in several places, the first."""
        found = (self._summary(name) for name in self._hashes())
        return [summary for summary in found if summary is not None]

    def touch(self, hash: str) -> None:
        """Note that an artifact is used now, where that can be written; of one in a read-only place, in the writable
        one, unless there is nothing there yet."""
        with suppress(OSError):
            if index.has_artifact(self.layout, hash) or not self.bases:
                os.utime(self.layout.artifacts / hash / MANIFEST)
            elif self.root.is_dir():
                make_dirs(self.layout.used)
                (self.layout.used / hash).touch(0o600)

    # Binaries

    def binary(self, key: str) -> Binary | None:
        """The record of a compiled piece whose files are all intact. A damaged one is removed."""
        return _binaries.find(self.layout, self.bases, key)

    def binary_files(self, key: str) -> builtins.list[Path]:
        """Its files: `<key>.so` and, where it calls custom ops, `<key>.json`."""
        return _binaries.files(self.layout, self.bases, key)

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
        return index.lookup(self.layouts, direct_key, digest_of)

    def remember(self, direct_key: str, hash: str, sources: Iterable[Source]) -> None:
        """Note what a direct key stands for."""
        index.remember(self.layout, direct_key, hash, sources)

    def prefer(self, direct_key: str, hash: str, sources: Iterable[Source]) -> None:
        """Have `lookup` find this before others that a direct key stands for, if it stands for it in this place."""
        index.prefer(self.layout, direct_key, hash, sources)

    # Tuning records

    def tuning(self, name: str) -> builtins.list[tuple[Path, bytes]]:
        """Path and text of each record of that name, this cache's before those of read-only places."""
        return tuning.read(self.layouts, name)

    def update_tuning(self, name: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Write what `change` makes of this cache's record of that name, nothing if that is None; one at a time."""
        tuning.update(self.layout, name, change)

    # Places to work in

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Held by one at a time; let go of when the process ends, however it ends. Not reentrant.

        `artifacts`, `binaries`, `index`, `staging` and `tuning` are the cache's own.
        """
        return lock(self.layout, name)

    def try_lock(self, name: str) -> AbstractContextManager[bool]:
        """The same lock, but not waited for: gives whether it is held."""
        return try_lock(self.layout, name)

    @contextmanager
    def building(self) -> Iterator[None]:
        """As long as anybody is inside, `prune` removes no binaries: a build uses some that no artifact refers to yet.
        Where nothing can be written, nothing can be pruned either."""
        with ExitStack() as held:
            with suppress(CacheIOError):
                held.enter_context(share(self.layout, BUILDING))
            yield

    def turn(self, name: str, seconds: float, waiting: Callable[[], None]) -> AbstractContextManager[bool]:
        """The same lock, waited for so long at most; `waiting` is called once if it has to be. Gives whether it was."""
        return turn(self.layout, name, seconds, waiting)

    def staging(self) -> AbstractContextManager[Path]:
        """A private directory on the cache's file system, removed afterwards."""
        return staging(self.layout)

    def scratch(self, name: str) -> Path:
        """A lasting directory for a compiler's own cache."""
        path = self.layout.scratch / name
        with io_errors("write", path):
            make_dirs(path)
        return path

    def _hashes(self, prefix: str = "") -> builtins.list[str]:
        return sorted({name for layout in self.layouts for name in _names(layout, prefix)})

    def _summary(self, hash: str) -> Summary | None:
        layout = next((layout for layout in self.layouts if index.has_artifact(layout, hash)), self.layout)
        path = layout.artifacts / hash
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
        used, read_only = status.st_mtime, layout is not self.layout
        with suppress(OSError):
            used = (self.layout.used / hash).stat().st_mtime if read_only else used
        return Summary(hash, manifest, size, _seconds(manifest, status.st_ctime), used, str(path), read_only)


def _open(layout: Layout, hash: str) -> Artifact:
    artifact = Artifact.open(layout.artifacts / hash)
    if artifact.manifest.hash != hash:
        raise DamagedError(
            f"{artifact.path / MANIFEST} is of artifact {artifact.manifest.hash}", "remove the directory"
        )
    return artifact


def _names(layout: Layout, prefix: str) -> list[str]:
    with io_errors("read", layout.artifacts):
        try:
            names = [name for name in again(lambda: os.listdir(layout.artifacts)) if name.startswith(prefix)]
            return [name for name in names if again((layout.artifacts / name / MANIFEST).is_file)]
        except FileNotFoundError:
            return []


def _seconds(manifest: Manifest | None, otherwise: float) -> float:
    if manifest is not None:
        with suppress(ValueError):
            return datetime.fromisoformat(manifest.created).timestamp()
    return otherwise
