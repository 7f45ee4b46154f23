"""Contents of files in a remote cache, by their sha256: small ones in packs, large ones as objects of their own.

    blobs/<sha256>           a large content
    packs/<sha256>           small ones, one after the other
    packed/<sha256>          in which pack a small one lies, and where
    artifacts/<hash>/packs.json   the same for all small ones of an artifact: one request instead of hundreds

The records save work and are not believed: what comes is used when its digest is right.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fxc.cache import key as keys
from fxc.cache import packs
from fxc.cache.artifact import Artifact
from fxc.cache.listing import listed
from fxc.cache.objects import Objects
from fxc.cache.packs import Place, Span
from fxc.cache.transfer import Beat, DamagedOnArrivalError, each
from fxc.errors import DamagedError
from fxc.manifest import File, Manifest

CHUNK = 1 << 24
"""Bytes of a large content asked for in one request."""

RECORD = "packs.json"

Progress = Callable[[int], None]
"""Told of bytes that have travelled, in the thread that asked."""


# Reading


def fetch(objects: Objects, hash: str, files: Iterable[File], directory: Path, parts: Path, progress: Progress) -> None:
    """Have the contents of an artifact's `files` in `directory`, by digest, each one checked. What is there already
    stays; what is not whole yet is in `parts`.

    Raises:
        DamagedError: a content is not at the remote, or is not what the manifest says at every try.
        CacheIOError: the remote cannot be read.
    """
    missing = {file.sha256: file for file in files if not (directory / file.sha256).exists()}
    where = _where(objects, hash, [file for file in missing.values() if packs.is_small(file)])
    spans = packs.spans([file for digest, file in missing.items() if digest in where], where)
    alone = [file for digest, file in missing.items() if digest not in where]

    def take(what: Span | File) -> int:
        name = f"packs/{what.pack}" if isinstance(what, Span) else f"blobs/{what.sha256}"
        try:
            if isinstance(what, Span):
                span = what
                objects.persist(lambda beat: _take_span(objects, name, span, directory, parts, beat), f"read {name}")
                return span.end - span.start
            file = what
            objects.persist(lambda beat: _take_blob(objects, name, file, directory, parts, beat), f"read {name}")
            return file.bytes
        except FileNotFoundError:
            raise DamagedError(f"{objects.url} lacks {name}", "push the artifact again") from None

    requests: list[Span | File] = [*alone, *spans]  # large ones first
    for size in each(requests, take, objects.patience):
        progress(size)


def _take_span(objects: Objects, name: str, span: Span, directory: Path, parts: Path, beat: Beat) -> None:
    data = memoryview(objects.get(name, span.start, span.end) if span.end > span.start else b"")
    start = 0
    for file in span.files:
        beat()  # a disk may be slow, too
        content = data[start : start + file.bytes]
        start += file.bytes
        if len(content) != file.bytes or keys.sha256(content) != file.sha256:
            raise DamagedOnArrivalError(f"{name} is damaged: {file.sha256} is not in it at byte {span.start + start}")
        with _arriving(directory, parts, file) as out:
            out.write(content)


def _take_blob(objects: Objects, name: str, file: File, directory: Path, parts: Path, beat: Beat) -> None:
    """One request for each `CHUNK` bytes, and none to ask for the size, which is known."""
    digest, size = hashlib.sha256(), 0
    with _arriving(directory, parts, file) as out:
        for start in range(0, file.bytes, CHUNK):
            chunk = objects.get(name, start, min(start + CHUNK, file.bytes))
            beat()
            digest.update(chunk)
            size += len(chunk)
            out.write(chunk)
        if size != file.bytes or digest.hexdigest() != file.sha256:
            raise DamagedOnArrivalError(f"{name} is damaged: {size} bytes came, expected {file.bytes} of that digest")


@contextmanager
def _arriving(directory: Path, parts: Path, file: File) -> Iterator[IO[bytes]]:
    """A new file, which gets its name when it is whole: a try that stalled may still write to its own."""
    descriptor, part = tempfile.mkstemp(dir=parts)
    with os.fdopen(descriptor, "wb", buffering=0) as out:
        yield out
        os.fsync(out.fileno())  # here, where it does not keep the others from arriving
    os.rename(part, directory / file.sha256)


def _where(objects: Objects, hash: str, files: Sequence[File]) -> dict[str, Place]:
    """Where small contents of an artifact lie, those of them that lie in a pack."""
    found = _record(objects, f"artifacts/{hash}/{RECORD}") if files else {}
    others = [file.sha256 for file in files if file.sha256 not in found]
    for places in each(others, lambda digest: _record(objects, f"packed/{digest}"), objects.patience):
        found |= places
    return {file.sha256: found[file.sha256] for file in files if file.sha256 in found}


def _record(objects: Objects, name: str) -> dict[str, Place]:
    try:
        return packs.decode(objects.read(name), name)
    except (FileNotFoundError, DamagedError):
        return {}


# Writing


def send(objects: Objects, artifact: Artifact, force: bool, progress: Progress) -> int:
    """Upload the contents that are not there yet; their bytes.

    Args:
        force: whether to upload those that seem to be there, too.

    Raises:
        DamagedError: a file of the artifact is.
        CacheIOError: they cannot be written.
    """
    files = listed(artifact.manifest)
    names = {file.sha256: name for name, file in files.items()}
    contents = {file.sha256: file for file in files.values()}.values()
    small = [file for file in contents if packs.is_small(file)]
    where = {} if force else _whole(objects, _where(objects, artifact.manifest.hash, small))
    groups = packs.groups(file for file in small if file.sha256 not in where)
    sent = 0

    def put(group: list[File]) -> dict[str, Place]:
        data = b"".join(artifact.read(names[file.sha256]) for file in group)
        pack = keys.sha256(data)
        objects.write(f"packs/{pack}", data)
        return packs.places(pack, group)

    def put_alone(file: File) -> int:
        name = f"blobs/{file.sha256}"
        if not force and objects.size(name) == file.bytes:
            return 0
        objects.write(name, artifact.read(names[file.sha256]))
        return file.bytes

    for size in each((file for file in contents if not packs.is_small(file)), put_alone, objects.patience):
        progress(size)
        sent += size
    new: dict[str, Place] = {}
    for places in each(groups, put, objects.patience):
        size = next(iter(places.values())).bytes
        progress(size)
        sent += size
        new |= places
    for _ in each(new, lambda digest: _point(objects, digest, new[digest]), objects.patience):
        pass
    _put_record(objects, artifact.manifest.hash, {**where, **new})
    return sent


def _point(objects: Objects, digest: str, place: Place) -> None:
    objects.write(f"packed/{digest}", packs.encode({digest: place}))


def _put_record(objects: Objects, hash: str, where: Mapping[str, Place]) -> None:
    """With what other ranks have put there. One that is lost when two do so at once is only slower to find."""
    name = f"artifacts/{hash}/{RECORD}"
    there = _record(objects, name)
    together = dict(sorted({**there, **where}.items()))
    if together != there:
        objects.write(name, packs.encode(together))


def _whole(objects: Objects, where: Mapping[str, Place]) -> dict[str, Place]:
    """Those whose packs are there in full."""
    sizes = {place.pack: place.bytes for place in where.values()}
    intact = dict(each(sizes, lambda pack: (pack, objects.size(f"packs/{pack}")), objects.patience))
    return {digest: place for digest, place in where.items() if intact[place.pack] == place.bytes}


def are_there(objects: Objects, manifest: Manifest) -> bool:
    """Whether a remote has all contents of an artifact, as far as sizes tell."""
    files = {file.sha256: file for file in listed(manifest).values()}.values()
    small = [file for file in files if packs.is_small(file)]
    large = [file for file in files if not packs.is_small(file)]
    if len(_whole(objects, _where(objects, manifest.hash, small))) < len(small):
        return False
    return all(each(large, lambda file: objects.size(f"blobs/{file.sha256}") == file.bytes, objects.patience))
