"""From direct keys to artifacts: what a spec stood for when certain source files had certain contents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from fxc.cache.artifact import reading
from fxc.cache.files import again, io_errors, sync_dir, write_file
from fxc.cache.layout import MANIFEST, Layout, is_hash
from fxc.cache.lock import lock, staging
from fxc.errors import CacheMissError, DamagedError
from fxc.manifest import Source, decode_sealed, seal

LIMIT = 16
"""Entries kept per direct key: states of the sources that one goes back and forth between."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hash: str
    sources: tuple[Source, ...]
    created: str = ""
    """When the artifact was built: a remote cache keeps entries in no order."""


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """index/<direct key>.json; newest first."""

    entries: tuple[Entry, ...] = ()


def lookup(layouts: Sequence[Layout], direct_key: str, digest_of: Callable[[Source], str | None]) -> str | None:
    """Hash of the first artifact that is there and whose sources all have the digests they had. Entries of all places
    count, and so do artifacts: an entry may stand in one place and its artifact in another."""
    for entry in chain.from_iterable(_load(layout, direct_key).entries for layout in layouts):
        same = all(digest_of(source) == source.digest for source in entry.sources)
        if same and any(has_artifact(layout, entry.hash) for layout in layouts):
            return entry.hash
    return None


def hashes(layout: Layout, direct_key: str) -> list[str]:
    """All that a direct key stood for, newest first."""
    return [entry.hash for entry in _load(layout, direct_key).entries]


def has_artifact(layout: Layout, hash: str) -> bool:
    """Whether a manifest is there, readable or not."""
    with io_errors("read", layout.artifacts):
        return is_hash(hash) and again((layout.artifacts / hash / MANIFEST).is_file)


def remember(layout: Layout, direct_key: str, hash: str, sources: Iterable[Source]) -> None:
    """Put an entry in front."""
    new = Entry(hash, tuple(sources))
    place = layout.index / f"{direct_key}.json"
    with staging(layout) as stage, lock(layout, "index"):
        old = _load(layout, direct_key).entries
        entries = (new, *(entry for entry in old if entry.sources != new.sources))[:LIMIT]
        with io_errors("write", place):
            write_file(stage / place.name, seal(msgspec.json.encode(Index(entries))))
            os.rename(stage / place.name, place)
            sync_dir(layout.index)


def prefer(layout: Layout, direct_key: str, hash: str, sources: Iterable[Source]) -> None:
    """Put an entry in front that stands behind others."""
    entry = Entry(hash, tuple(sources))
    if entry in _load(layout, direct_key).entries[1:]:
        remember(layout, direct_key, entry.hash, entry.sources)


def _load(layout: Layout, direct_key: str) -> Index:
    """What is absent or damaged is empty: the trace runs again and writes it anew."""
    path = layout.index / f"{direct_key}.json"
    try:
        with reading(path, CacheMissError(f"no {path}")):
            data = again(path.read_bytes)
        return decode_sealed(data, Index, str(path), "")
    except (CacheMissError, DamagedError):
        return Index()
