"""A cache that many machines share, at any address that fsspec understands: s3://, gs://, az://, file://, a folder.

    <url>/v1/
      blobs/<sha256>                       contents of files, each once whatever artifacts have it
      artifacts/<hash>/manifest.json       written last: what it lists is there
      artifacts/<hash>/manifest.sig        before it, if it is signed
      index/<direct key>/<digest>.json     after it: a hash, and the source files it stands for

Nothing is renamed or changed in place, and nothing is believed: a blob is used when its digest is the manifest's, a
manifest when its seal is whole. So an upload that ends half-way leaves what the next one goes on from.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fxc.cache import key as keys
from fxc.cache.artifact import Artifact, check_format
from fxc.cache.index import Entry
from fxc.cache.layout import MANIFEST, SIGNATURE
from fxc.cache.listing import listed
from fxc.cache.transfer import DamagedOnArrivalError, Patience, each, persistently
from fxc.errors import CacheIOError, CacheMissError, DamagedError, FxcError, IncompatibleError, UsageError
from fxc.manifest import FORMAT, File, Manifest, Source, decode, decode_sealed, encode, seal

CHUNK = 1 << 24
"""Bytes asked for in one request."""
SLOWEST = 1 << 17
"""Bytes a second below which an upload, which gives no sign of life, counts as stalled."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "adl": "azure"}
MERGES = 3
"""How often a manifest is written again because another rank's came in between."""

Progress = Callable[[int], None]
"""Told of bytes that have travelled, in the thread that asked."""


class Remote(msgspec.Struct, frozen=True):
    url: str
    fs: Any
    """fsspec.AbstractFileSystem."""
    root: str
    patience: Patience = Patience()

    @classmethod
    def open(cls, url: str, patience: Patience | None = None) -> Remote:
        """The remote cache at an fsspec URL. Reads nothing yet.

        Raises:
            UsageError: no such kind of address, or the package for it is not installed.
        """
        import fsspec

        try:
            fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            kind = url.partition("://")[0]
            hint = f"pip install 'fxc[{EXTRAS[kind]}]'" if kind in EXTRAS else "write s3://, gs://, az:// or file://"
            raise UsageError(f"the remote cache {url} cannot be opened: {error}", hint) from None
        return cls(url, fs, f"{root.rstrip('/')}/v{FORMAT}", patience or Patience())

    # Reading

    def manifest(self, hash: str) -> Artifact:
        """An artifact's manifest and signature; its `path` is only a name.

        Raises:
            CacheMissError: it is not there.
            DamagedError: it is damaged.
            CacheIOError: the remote cannot be read.
        """
        name = f"artifacts/{hash}/{MANIFEST}"

        def read(beat: Callable[[], None]) -> tuple[bytes, Manifest]:
            data = self._read(name, beat)
            check_format(data, Path(f"{self.url}: {name}"))
            try:
                return data, decode(data, name)
            except DamagedError as error:  # it may have been cut off on the way
                raise DamagedOnArrivalError(error.message) from error

        try:
            data, manifest = self._try(read, f"read {name}")
        except FileNotFoundError:
            raise CacheMissError(f"no artifact {hash} in {self.url}", "`fxc push` puts it there") from None
        if manifest.hash != hash:
            raise DamagedError(f"{self.url}: {name} is of artifact {manifest.hash}", "push it again with --force")
        signature = b""
        with suppress(FileNotFoundError):
            signature = self._try(functools.partial(self._read, f"artifacts/{hash}/{SIGNATURE}"), "read the signature")
        return Artifact(Path(f"{self.url}/{hash}"), manifest, data, signature)

    def resolve(self, prefix: str) -> str:
        """The hash that begins so.

        Raises:
            CacheMissError: none or several do.
        """
        if re.fullmatch(r"[0-9a-f]{32}", prefix):
            return prefix
        names = [name for name in self._names("artifacts") if name.startswith(prefix)]
        if len(names) != 1:
            what = f"{prefix} is ambiguous in" if names else f"no artifact {prefix} in"
            raise CacheMissError(f"{what} {self.url}", "give more digits" if names else "`fxc push` puts it there")
        return names[0]

    def lookup(self, direct_key: str, digest_of: Callable[[Source], str | None]) -> str | None:
        """Hash of an artifact that a direct key stands for while its source files are what they were."""
        for name in self._names(f"index/{direct_key}"):
            where = f"index/{direct_key}/{name}"
            try:
                data = self._try(functools.partial(self._read, where), f"read {where}")
                entry = decode_sealed(data, Entry, where, "")
            except (FileNotFoundError, DamagedError):
                continue
            if all(digest_of(source) == source.digest for source in entry.sources):
                return entry.hash
        return None

    def fetch(self, files: Iterable[File], directory: Path, parts: Path, progress: Progress) -> None:
        """Have the contents of `files` in `directory`, by digest, each one checked. What is there already stays; what
        is not whole yet is in `parts`.

        Raises:
            DamagedError: a blob is not at the remote, or is not what the manifest says at every try.
            CacheIOError: the remote cannot be read.
        """
        missing = {file.sha256: file for file in files if not (directory / file.sha256).exists()}
        for file in each(missing.values(), lambda file: self._fetch(file, directory, parts), self.patience):
            progress(file.bytes)

    def _fetch(self, file: File, directory: Path, parts: Path) -> File:
        name = f"blobs/{file.sha256}"
        turns = iter(range(1 << 30))

        def read(beat: Callable[[], None]) -> None:
            part = parts / f"{file.sha256}.{next(turns)}"  # a stalled try may still write to its own
            self._download(name, part, file, beat)
            os.rename(part, directory / file.sha256)

        try:
            self._try(read, f"read {name}")
        except FileNotFoundError:
            raise DamagedError(f"{self.url} lacks {name}", "push the artifact again") from None
        return file

    def _download(self, name: str, part: Path, file: File, beat: Callable[[], None]) -> None:
        """One request for each `CHUNK` bytes, and none to ask for the size, which is known."""
        digest, size = hashlib.sha256(), 0
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            for start in range(0, file.bytes, CHUNK):
                chunk = self.fs.cat_file(self._path(name), start=start, end=min(start + CHUNK, file.bytes))
                beat()
                digest.update(chunk)
                size += len(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if size != file.bytes or digest.hexdigest() != file.sha256:
            raise DamagedOnArrivalError(f"{name} is damaged: {size} bytes came, expected {file.bytes} of that digest")

    # Writing

    def push(self, artifact: Artifact, entries: Iterable[tuple[str, Entry]], force: bool, progress: Progress) -> int:
        """Upload what is not there yet: blobs, then signature and manifest, then index entries. Gives the bytes.

        Raises:
            DamagedError: a file of the artifact is.
            CacheIOError: the remote cannot be written.
        """
        files = listed(artifact.manifest)
        names = {file.sha256: name for name, file in files.items()}
        sent = 0
        for size in each(
            names.items(), lambda item: self._send(artifact, item[1], files[item[1]], force), self.patience
        ):
            progress(size)
            sent += size
        for _ in range(MERGES):
            merged = self._merged(artifact)
            folder = f"artifacts/{artifact.manifest.hash}"
            if merged.signature:
                self._write(f"{folder}/{SIGNATURE}", merged.signature)
            self._write(f"{folder}/{MANIFEST}", merged.data)
            if self._merged(artifact).data == merged.data:
                break
        for direct_key, entry in entries:
            data = seal(msgspec.json.encode(entry))
            self._write(f"index/{direct_key}/{keys.sha256(data)[:32]}.json", data)
        return sent

    def has(self, artifact: Artifact) -> bool:
        """Whether another push of the same artifact, or of a build of it elsewhere, would add nothing."""
        try:
            there = self.manifest(artifact.manifest.hash)
            same = there.manifest.ranks.keys() >= artifact.manifest.ranks.keys()
            signed = (there.data, there.signature) == (artifact.data, artifact.signature)
            if not same or (artifact.signature and not signed):
                return False
            return all(each(listed(there.manifest).values(), self._has_blob, self.patience))
        except (CacheMissError, DamagedError, IncompatibleError):
            return False

    def _has_blob(self, file: File) -> bool:
        return self._size(f"blobs/{file.sha256}") == file.bytes

    def _send(self, artifact: Artifact, name: str, file: File, force: bool) -> int:
        if not force and self._has_blob(file):
            return 0
        self._write(f"blobs/{file.sha256}", artifact.read(name))
        return file.bytes

    def _merged(self, artifact: Artifact) -> Artifact:
        """With the ranks that are at the remote and not here; signed ones are as they are."""
        try:
            there = self.manifest(artifact.manifest.hash).manifest.ranks
        except FxcError:
            return artifact
        others = {name: rank for name, rank in there.items() if name not in artifact.manifest.ranks}
        if not others or artifact.signature:
            return artifact
        ranks = dict(sorted({**artifact.manifest.ranks, **others}.items()))
        manifest = msgspec.structs.replace(artifact.manifest, ranks=ranks)
        return Artifact(artifact.path, manifest, encode(manifest))

    def _write(self, name: str, data: bytes) -> None:
        def write(beat: Callable[[], None]) -> None:
            path = self._path(name)
            try:
                self.fs.pipe_file(path, data)
            except FileNotFoundError:
                if self._is_object_store:  # which would make a bucket
                    raise
                self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self.fs.pipe_file(path, data)
            if self._is_object_store:  # takes all or nothing
                return
            beat()
            size = self.fs.info(path)["size"]
            if size is not None and size != len(data):
                raise DamagedOnArrivalError(f"{name} has {size} bytes there, expected {len(data)}")

        patience = msgspec.structs.replace(self.patience, stall=self.patience.stall + len(data) / SLOWEST)
        try:
            persistently(write, f"write {name} to {self.url}", patience)
        except FileNotFoundError:
            raise CacheIOError(
                f"cannot write {name} to {self.url}: there is no such place", "make the bucket"
            ) from None

    # Calls

    @property
    def _is_object_store(self) -> bool:
        kinds = self.fs.protocol
        return not EXTRAS.keys().isdisjoint((kinds,) if isinstance(kinds, str) else kinds)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _read(self, name: str, beat: Callable[[], None]) -> bytes:
        data: bytes = self.fs.cat_file(self._path(name))
        return data

    def _size(self, name: str) -> int | None:
        try:
            size: int | None = self._try(lambda beat: self.fs.info(self._path(name))["size"], f"look for {name}")
        except FileNotFoundError:
            return None
        return size

    def _names(self, folder: str) -> Sequence[str]:
        try:
            found = self._try(lambda beat: self.fs.ls(self._path(folder), detail=False), f"list {folder}")
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def _try(self, call: Callable[[Callable[[], None]], Any], what: str) -> Any:
        try:
            return persistently(call, f"{what} at {self.url}", self.patience)
        except CacheIOError as error:
            if isinstance(error.__cause__, DamagedOnArrivalError):
                raise DamagedError(f"{self.url}: {error.__cause__}", "push the artifact again with --force") from error
            raise
