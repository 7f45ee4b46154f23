"""A cache that many machines share, at any address that fsspec understands: s3://, gs://, az://, file://, a folder.

    <url>/v1/
      blobs/<sha256>                       contents of files, each once whatever artifacts have it
      packs/<sha256>                       small ones, many in one object
      packed/<sha256>                      where a small one lies
      artifacts/<hash>/packs.json          where all of an artifact lie
      artifacts/<hash>/manifest.json       written last: what it lists is there
      artifacts/<hash>/manifest.sig        before it, if it is signed
      index/<direct key>/<digest>.json     after it: a hash, and the source files it stands for

Nothing is renamed or changed in place, and nothing is believed: a content is used when its digest is the manifest's, a
manifest when its seal is whole. So an upload that ends half-way leaves what the next one goes on from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fxc import verified
from fxc.cache import contents
from fxc.cache import key as keys
from fxc.cache.artifact import Artifact, check_format
from fxc.cache.contents import Progress
from fxc.cache.index import Entry
from fxc.cache.layout import MANIFEST, SIGNATURE
from fxc.cache.objects import Objects
from fxc.cache.transfer import Beat, DamagedOnArrivalError, each
from fxc.errors import CacheMissError, DamagedError, FxcError, IncompatibleError
from fxc.manifest import File, Manifest, Source, decode, decode_sealed, encode, seal

MERGES = 3
"""How often a manifest is written again because another rank's came in between."""


class Remote(Objects, frozen=True):
    """Artifacts among the objects at an address."""

    # Reading

    def manifest(self, hash: str) -> Artifact:
        """An artifact's manifest and signature; its `path` is only a name.

        Raises:
            CacheMissError: it is not there.
            DamagedError: it is damaged.
            CacheIOError: the remote cannot be read.
        """
        name = f"artifacts/{hash}/{MANIFEST}"

        def read(beat: Beat) -> tuple[bytes, Manifest]:
            data = self.get(name)
            check_format(data, Path(f"{self.url}: {name}"))
            try:
                return data, decode(data, name)
            except DamagedError as error:  # it may have been cut off on the way
                raise DamagedOnArrivalError(error.message) from error

        def signature(beat: Beat) -> bytes:
            with suppress(FileNotFoundError):
                return self.get(f"artifacts/{hash}/{SIGNATURE}")
            return b""

        calls: dict[str, Callable[[Beat], Any]] = {"manifest": read, "signature": signature}
        try:  # both at once
            found = dict(each(calls, lambda what: (what, self.persist(calls[what], f"read {name}")), self.patience))
        except FileNotFoundError:
            raise CacheMissError(f"no artifact {hash} in {self.url}", "`fxc push` puts it there") from None
        data, manifest = found["manifest"]
        if manifest.hash != hash:
            raise DamagedError(f"{self.url}: {name} is of artifact {manifest.hash}", "push it again with --force")
        return Artifact(Path(f"{self.url}/{hash}"), manifest, data, found["signature"])

    def resolve(self, prefix: str) -> str:
        """The hash that begins so.

        Raises:
            CacheMissError: none or several do.
        """
        if re.fullmatch(r"[0-9a-f]{32}", prefix):
            return prefix
        names = [name for name in self.names("artifacts") if name.startswith(prefix)]
        if len(names) != 1:
            what = f"{prefix} is ambiguous in" if names else f"no artifact {prefix} in"
            raise CacheMissError(f"{what} {self.url}", "give more digits" if names else "`fxc push` puts it there")
        return names[0]

    def lookup(self, direct_key: str, digest_of: Callable[[Source], str | None]) -> str | None:
        """Hash of an artifact that a direct key stands for while its source files are what they were; of several, as
        of tuned and untuned ones, the one that was built last."""
        found: list[tuple[str, str]] = []
        for name in self.names(f"index/{direct_key}"):
            where = f"index/{direct_key}/{name}"
            try:
                entry = decode_sealed(self.read(where), Entry, where, "")
            except (FileNotFoundError, DamagedError):
                continue
            if all(digest_of(source) == source.digest for source in entry.sources):
                found.append((entry.created, entry.hash))
        return max(found)[1] if found else None

    def fetch(self, hash: str, files: Iterable[File], directory: Path, parts: Path, progress: Progress) -> None:
        """Have the contents of an artifact's `files` in `directory`, by digest, each one checked. What is there already
        stays; what is not whole yet is in `parts`.

        Raises:
            DamagedError: a content is not at the remote, or is not what the manifest says at every try.
            CacheIOError: the remote cannot be read.
        """
        contents.fetch(self, hash, files, directory, parts, progress)

    # Writing

    def push(self, artifact: Artifact, entries: Iterable[tuple[str, Entry]], force: bool, progress: Progress) -> int:
        """Upload what is not there yet: contents, then signature and manifest, then index entries. Gives the bytes.

        Raises:
            DamagedError: a file of the artifact is.
            CacheIOError: the remote cannot be written.
        """
        sent = contents.send(self, artifact, force, progress)
        for _ in range(MERGES):
            merged = self._merged(artifact)
            folder = f"artifacts/{artifact.manifest.hash}"
            if merged.signature:
                self.write(f"{folder}/{SIGNATURE}", merged.signature)
            self.write(f"{folder}/{MANIFEST}", merged.data)
            if self._merged(artifact).data == merged.data:
                break
        for direct_key, entry in entries:
            data = seal(msgspec.json.encode(entry))
            self.write(f"index/{direct_key}/{keys.sha256(data)[:32]}.json", data)
        return sent

    def has(self, artifact: Artifact) -> bool:
        """Whether another push of the same artifact, or of a build of it elsewhere, would add nothing."""
        try:
            there = self.manifest(artifact.manifest.hash)
            same = there.manifest.ranks.keys() >= artifact.manifest.ranks.keys()
            signed = (there.data, there.signature) == (artifact.data, artifact.signature)
            verified = there.manifest.verified or not artifact.manifest.verified
            if not same or not verified or (artifact.signature and not signed):
                return False
            return contents.are_there(self, there.manifest)
        except (CacheMissError, DamagedError, IncompatibleError):
            return False

    def _merged(self, artifact: Artifact) -> Artifact:
        """With the ranks that are at the remote and not here, and its note that the binaries have run; a signed one is
        as it is."""
        try:
            there = self.manifest(artifact.manifest.hash).manifest
        except FxcError:
            return artifact
        same = there.binaries.keys() == artifact.manifest.binaries.keys()
        if not same or artifact.signature:
            return artifact
        others = {name: rank for name, rank in there.ranks.items() if name not in artifact.manifest.ranks}
        manifest = verified.merge(there, artifact.manifest, others)
        return artifact if manifest == artifact.manifest else Artifact(artifact.path, manifest, encode(manifest))
