"""Which artifacts a prune removes: a pure function of what there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from fxc.manifest import Manifest

Sizes = Mapping[int, int]
"""Bytes by inode: files that are hard links of each other count once."""


class Rules(msgspec.Struct, frozen=True):
    """What to remove. Without any of these, no artifact."""

    keep_latest: int | None = None
    """Of the artifacts used most recently, how many stay whatever the other rules say. Alone: all others go."""
    older_than: float | None = None
    """Seconds since the last use."""
    max_bytes: int | None = None
    """Of artifacts and binaries together, after the other rules; the least recently used go until it is met."""
    unfit: Callable[[Manifest], bool] | None = None
    """Whether an artifact does not fit this machine."""

    @property
    def only_keep_latest(self) -> bool:
        return self.keep_latest is not None and (self.older_than, self.max_bytes, self.unfit) == (None, None, None)


class Entry(msgspec.Struct, frozen=True):
    """An artifact that there is."""

    hash: str
    manifest: Manifest | None
    """None where it cannot be read."""
    last_used: float
    """Seconds since the epoch."""
    files: Sizes
    """Its own files and those of the binaries that it refers to."""
    in_use: bool = False


class Removal(msgspec.Struct, frozen=True):
    hash: str
    reason: str
    bytes: int
    """That become free with it, after those before it."""
    last_used: float


class Choice(msgspec.Struct, frozen=True):
    removals: tuple[Removal, ...]
    in_use: tuple[str, ...]
    """What would have gone, if it were not in use."""
    bytes: int
    """Of what stays."""


def choose(entries: Iterable[Entry], rules: Rules, now: float) -> Choice:
    """What goes, least recently used first."""
    oldest_first = sorted(entries, key=lambda entry: (entry.last_used, entry.hash))
    left = _Left(oldest_first)
    kept = {entry.hash for entry in oldest_first[-rules.keep_latest :]} if rules.keep_latest else set()
    removals: list[Removal] = []
    in_use: list[str] = []

    def take(entry: Entry, reason: str) -> None:
        if entry.in_use:
            in_use.append(entry.hash)
        else:
            removals.append(Removal(entry.hash, reason, left.remove(entry), entry.last_used))

    open_to = [entry for entry in oldest_first if entry.hash not in kept]
    for entry in open_to:
        if reason := _reason(entry, rules, now):
            take(entry, reason)
    if rules.max_bytes is not None:
        gone = {removal.hash for removal in removals} | {*in_use}
        for entry in open_to:
            if left.bytes <= rules.max_bytes:
                break
            if entry.hash not in gone:
                take(entry, "max-bytes")
    return Choice(tuple(removals), tuple(in_use), left.bytes)


def _reason(entry: Entry, rules: Rules, now: float) -> str:
    """Why an artifact goes, apart from the room it takes; empty where it stays."""
    if rules.unfit is not None and (entry.manifest is None or rules.unfit(entry.manifest)):
        return "incompatible"
    if rules.older_than is not None and now - entry.last_used > rules.older_than:
        return "older-than"
    return "keep-latest" if rules.only_keep_latest else ""


class _Left:
    """Counts who refers to each inode."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._counts = Counter(inode for entry in entries for inode in entry.files)
        self.bytes = sum({inode: size for entry in entries for inode, size in entry.files.items()}.values())

    def remove(self, entry: Entry) -> int:
        """Bytes that nobody refers to any more."""
        self._counts.subtract(entry.files.keys())
        freed = sum(size for inode, size in entry.files.items() if not self._counts[inode])
        self.bytes -= freed
        return freed
