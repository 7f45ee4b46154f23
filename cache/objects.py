"""Named objects at any address that fsspec understands: s3://, gs://, az://, file://, a folder. Calls are
tried again when they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fxc.cache.transfer import Beat, DamagedOnArrivalError, Patience, persistently
from fxc.errors import CacheIOError, DamagedError, UsageError
from fxc.manifest import FORMAT

SLOWEST = 1 << 17
"""Bytes a second below which an upload, which gives no sign of life, counts as stalled."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "adl": "azure"}


class Objects(msgspec.Struct, frozen=True):
    """Objects below one format's folder of an address, by names such as `blobs/<sha256>`."""

    url: str
    fs: Any
    """fsspec.AbstractFileSystem."""
    root: str
    patience: Patience = Patience()

    @classmethod
    def open(cls, url: str, patience: Patience | None = None) -> Any:
        """Those at an fsspec URL. Reads nothing yet.

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

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """An object, or a part of it; asked for once.

        Raises:
            FileNotFoundError: it is not there.
        """
        data: bytes = self.fs.cat_file(self._path(name), start=start, end=end)
        return data

    def read(self, name: str) -> bytes:
        """An object, asked for until it comes.

        Raises:
            FileNotFoundError: it is not there.
            CacheIOError: it cannot be read.
        """
        data: bytes = self.persist(lambda beat: self.get(name), f"read {name}")
        return data

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where it is not there."""
        try:
            size: int | None = self.persist(lambda beat: self.fs.info(self._path(name))["size"], f"look for {name}")
        except FileNotFoundError:
            return None
        return size

    def names(self, folder: str) -> Sequence[str]:
        """What is in a folder, sorted."""
        try:
            found = self.persist(lambda beat: self.fs.ls(self._path(folder), detail=False), f"list {folder}")
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def write(self, name: str, data: bytes) -> None:
        """Make an object, or replace it.

        Raises:
            CacheIOError: it cannot be written.
        """

        def write(beat: Beat) -> None:
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

    def persist(self, call: Callable[[Beat], Any], what: str) -> Any:
        """`call`'s answer, tried again while it fails.

        Raises:
            DamagedError: what came was not what was asked for, at every try.
            FileNotFoundError, CacheIOError: as `persistently`.
        """
        try:
            return persistently(call, f"{what} at {self.url}", self.patience)
        except CacheIOError as error:
            if isinstance(error.__cause__, DamagedOnArrivalError):
                raise DamagedError(f"{self.url}: {error.__cause__}", "push the artifact again with --force") from error
            raise

    @property
    def _is_object_store(self) -> bool:
        kinds = self.fs.protocol
        return not EXTRAS.keys().isdisjoint((kinds,) if isinstance(kinds, str) else kinds)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"
