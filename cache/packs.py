"""Many small contents in one object, a pack: a compiled piece has some 300 kB, and asking for it takes longer than
sending it. Which contents lie where is a record of its own; a pack is nothing but their bytes, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from fxc.manifest import File, decode_sealed, seal

PACK = 1 << 23
"""Bytes of a pack, and of what is asked for in one request: several travel at once, and what has come when a connection
breaks is not lost. Contents of more than half of it are objects of their own."""


class Place(msgspec.Struct, frozen=True):
    """Where a content lies."""

    pack: str
    """sha256 of the pack's bytes."""
    start: int
    """Bytes before it."""
    bytes: int
    """Of the pack."""


class Span(msgspec.Struct, frozen=True):
    """Contents that lie one after the other in a pack, and are asked for in one request."""

    pack: str
    start: int
    files: tuple[File, ...]

    @property
    def end(self) -> int:
        return self.start + sum(file.bytes for file in self.files)


def is_small(file: File) -> bool:
    """Whether it travels in a pack."""
    return file.bytes <= PACK // 2


def groups(files: Iterable[File]) -> Iterator[list[File]]:
    """Contents in packs, in their order."""
    group: list[File] = []
    for file in files:
        if group and sum(entry.bytes for entry in group) + file.bytes > PACK:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def places(pack: str, group: Iterable[File]) -> dict[str, Place]:
    """Where the contents of a pack lie, by digest."""
    group, found, start = [*group], {}, 0
    size = sum(file.bytes for file in group)
    for file in group:
        found[file.sha256] = Place(pack, start, size)
        start += file.bytes
    return found


def spans(files: Iterable[File], where: Mapping[str, Place]) -> list[Span]:
    """The requests for some contents, which are all in packs: what lies between them does not travel."""
    found: list[Span] = []
    ordered = sorted(files, key=lambda file: (where[file.sha256].pack, where[file.sha256].start, file.bytes))
    for file in ordered:
        place, last = where[file.sha256], found[-1] if found else None
        if last is not None and (last.pack, last.end) == (place.pack, place.start):
            found[-1] = Span(last.pack, last.start, (*last.files, file))
        else:
            found.append(Span(place.pack, place.start, (file,)))
    return found


def encode(where: Mapping[str, Place]) -> bytes:
    """The record of some places, by digest."""
    return seal(msgspec.json.encode(where))


def decode(data: bytes, name: str) -> dict[str, Place]:
    """Undo `encode`; `name` is named in the error.

    Raises:
        DamagedError: it is not that.
    """
    return decode_sealed(data, dict[str, Place], name, "push the artifact again with --force")
