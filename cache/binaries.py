"""Compiled pieces, one directory per key, shared by all artifacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fxc.cache import key as keys
from fxc.cache.artifact import check_file, reading
from fxc.cache.files import again, copy_file, displace, install, io_errors, link_file, replace, write_file
from fxc.cache.layout import RECORD, Layout
from fxc.cache.lock import lock, staging
from fxc.errors import CacheIOError, CacheMissError, DamagedError
from fxc.manifest import Binary, File, decode_sealed, seal


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """record.json."""

    binary: Binary
    files: dict[str, File]
    """By name: `<key>.so`, `<key>.json`."""


def load(layout: Layout, key: str) -> Record:
    """A binary's record, its files not looked at.

    Raises:
        CacheMissError: there is none.
        DamagedError: it is damaged.
    """
    path = layout.binaries / key / RECORD
    with reading(path, CacheMissError(f"no binary {key} in {layout.binaries}", "run `fxc build` again")):
        data = again(path.read_bytes)
    record = decode_sealed(data, Record, str(path), "run `fxc build` again")
    library, names = record.files.get(f"{key}.so"), {f"{key}.so", f"{key}.json"}
    if library is None or library.sha256 != record.binary.sha256 or not record.files.keys() <= names:
        raise DamagedError(f"{path} is damaged: it is not of {key}.so", "run `fxc build` again")
    return record


def find(layout: Layout, bases: Sequence[Layout], key: str) -> Binary | None:
    """The binary's record if all of its files are intact in one of the places. What is damaged in `layout` is removed,
    so that it is compiled again; nothing in the others is."""
    found = _intact(layout, key)
    place = layout.binaries / key
    if found is None and place.exists():
        with suppress(CacheIOError), staging(layout) as stage, lock(layout, "binaries"):
            found = _intact(layout, key)  # another process may have mended it meanwhile
            if found is None and place.exists():
                with io_errors("remove", place):
                    displace(place, stage / key)
    for base in bases:
        found = found or _intact(base, key)
    return found.binary if found else None


def files(layout: Layout, bases: Sequence[Layout], key: str) -> list[Path]:
    """Its files, in the first place where they are intact.

    Raises:
        CacheMissError, DamagedError: as `load` in `layout`, where they are intact in none.
    """
    place = next((place for place in (layout, *bases) if _intact(place, key)), layout)
    return [place.binaries / key / name for name in sorted(load(place, key).files)]


def adopt(layout: Layout, bases: Sequence[Layout], key: str) -> None:
    """Copy a binary that only a base has, so that it can be linked: a base may lie on another file system, and not even
    the number of links of its files is changed."""
    if (layout.binaries / key / RECORD).is_file():
        return
    for base in bases:
        if (record := _intact(base, key)) is not None:
            store(layout, key, {name: base.binaries / key / name for name in record.files}, record.binary, False)
            return


def store(layout: Layout, key: str, sources: Mapping[str, Path], binary: Binary, force: bool) -> None:
    """Copy the files of a compiled piece; an intact one that is there already stays, unless `force`."""
    with staging(layout) as stage:
        new = stage / key
        with io_errors("write", layout.binaries / key):
            new.mkdir(mode=0o700)
            for name, source in sources.items():
                copy_file(source, new / name)
            files = {name: measure(new / name) for name in sources}
            write_file(new / RECORD, _record(key, binary, files))
        with lock(layout, "binaries"), io_errors("write", layout.binaries / key):
            if force or _intact(layout, key) is None:
                install(new, layout.binaries / key)


def share(layout: Layout, records: Mapping[str, Record], path_of: Callable[[str], Path], stage: Path) -> None:
    """Link the files of many compiled pieces, which were checked; intact ones that are there already stay. Nothing is
    written through to the disk: a crash takes away a record at most, and a binary without a whole one is no binary.

    Args:
        records: by key.
        path_of: gives where a file lies, by its name.
    """
    stage = stage / "binaries"
    with io_errors("write", layout.binaries):
        stage.mkdir(mode=0o700)
        for key, record in records.items():
            new = stage / key
            new.mkdir(mode=0o700)
            for name in record.files:
                link_file(path_of(name), new / name)
            write_file(new / RECORD, _record(key, record.binary, record.files), sync=False)
        with lock(layout, "binaries"):
            for key in records:
                place = layout.binaries / key
                if not place.exists() or _intact(layout, key) is None:
                    replace(stage / key, place)


def _record(key: str, binary: Binary, files: dict[str, File]) -> bytes:
    if files[f"{key}.so"].sha256 != binary.sha256:
        raise DamagedError(f"binary {key}: {key}.so is not what its record says", "run `fxc build` again")
    return seal(msgspec.json.encode(Record(binary, files)))


def measure(path: Path) -> File:
    """Size and digest of a file."""
    return File(bytes=path.stat().st_size, sha256=keys.sha256_file(path))


def _intact(layout: Layout, key: str) -> Record | None:
    try:
        record = load(layout, key)
        for name, expected in record.files.items():
            check_file(layout.binaries / key / name, expected)
    except (CacheMissError, DamagedError):
        return None
    return record
