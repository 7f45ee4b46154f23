"""Between this cache and a remote one: what to look for there, and what to put there. Imports no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from fxc import identity
from fxc.cache import Artifact, Cache, Remote, Trust
from fxc.cache.index import Entry
from fxc.cache.listing import listed
from fxc.errors import CacheMissError, FxcError, UsageError
from fxc.manifest import Manifest
from fxc.progress import Observer
from fxc.ranks import Ranks
from fxc.spec import Spec
from fxc.target import Target

VARIABLE = "FXC_REMOTE"


class Shared(msgspec.Struct, frozen=True):
    """A remote cache, for a machine that looks there for what it lacks."""

    remote: Remote
    cache: Cache
    trust: Trust
    observer: Observer

    @classmethod
    def open(cls, url: str | None, cache: Cache, observer: Observer, trust: Trust | None = None) -> Shared | None:
        """The remote cache at `url`, else at FXC_REMOTE; None where neither names one.

        Raises:
            UsageError: it cannot be opened.
        """
        url = url or os.environ.get(VARIABLE)
        return cls(Remote.open(url), cache, trust or Trust.of(os.environ), observer) if url else None

    def find(
        self, spec: Spec, directory: Path, place: Ranks, *, compiler: bool = False, target: Target | None = None,
        tuning: str | None = None,
    ) -> str | None:  # fmt: skip
        """The hash for a spec whose sources are as they were, as `identity.find`."""
        return identity.search(
            self.remote.lookup, spec, directory, place, compiler=compiler, target=target, tuning=tuning
        )

    def pull(self, hash: str) -> tuple[Artifact, int]:
        """Take in an artifact, and what its direct keys stand for; and the bytes that travelled.

        Raises:
            CacheMissError, DamagedError, CacheIOError: as `Remote.manifest` and `Cache.pull`.
        """
        self.observer.phase("pull")
        start = time.perf_counter()
        found = self.remote.manifest(hash)
        self.observer.transfer(_bytes(found.manifest))
        moved: list[int] = []

        def progress(count: int) -> None:
            moved.append(count)
            self.observer.transferred(count)

        artifact = self.cache.pull(self.remote, found, self.trust, progress)
        identity.remember_all(self.cache, artifact.manifest)
        self.observer.phase_done("pull", time.perf_counter() - start)
        return artifact, sum(moved)

    def push(self, artifact: Artifact, *, force: bool = False) -> int:
        """Upload what is not there yet; the bytes that travelled.

        Raises:
            DamagedError: a file of the artifact is.
            CacheIOError: the remote cannot be written.
        """
        self.observer.phase("push")
        start = time.perf_counter()
        sent = 0
        if force or not self.remote.has(artifact):
            manifest = artifact.manifest
            self.observer.transfer(_bytes(manifest))
            sources = identity.index_sources(manifest)
            keys = identity.direct_keys(manifest) if sources else ()
            entries = [(key, Entry(manifest.hash, sources, manifest.created)) for key in keys]
            sent = self.remote.push(artifact, entries, force, self.observer.transferred)
        self.observer.phase_done("push", time.perf_counter() - start)
        return sent

    def take_spec(
        self, spec: Spec, directory: Path, place: Ranks, *, compiler: bool = False, target: Target | None = None,
        tuning: str | None = None,
    ) -> str | None:  # fmt: skip
        """Pull what a spec stands for, if it is there. A remote that fails is no reason to do nothing: the hash, or
        None and a note."""
        try:
            hash = self.find(spec, directory, place, compiler=compiler, target=target, tuning=tuning)
            return None if hash is None else self.pull(hash)[0].manifest.hash
        except FxcError as error:
            self.observer.note(f"not from {self.remote.url}: {error.message}")
            return None

    def take(self, hash: str) -> bool:
        """The same for a hash."""
        try:
            self.pull(hash)
        except CacheMissError:
            return False
        except FxcError as error:
            self.observer.note(f"not from {self.remote.url}: {error.message}")
            return False
        return True

    def take_prefix(self, prefix: str) -> bool:
        """The same for the beginning of one."""
        try:
            hash = self.remote.resolve(prefix)
        except FxcError as error:
            self.observer.note(f"not from {self.remote.url}: {error.message}")
            return False
        return self.take(hash)


def require(url: str | None, cache: Cache, observer: Observer, trust: Trust | None = None) -> Shared:
    """The remote cache that a command is about.

    Raises:
        UsageError: none is named.
    """
    shared = Shared.open(url, cache, observer, trust)
    if shared is None:
        raise UsageError("no remote cache is named", f"give --remote URL or set {VARIABLE}")
    return shared


def _bytes(manifest: Manifest) -> int:
    """Contents that are equal travel once."""
    return sum({file.sha256: file.bytes for file in listed(manifest).values()}.values())
