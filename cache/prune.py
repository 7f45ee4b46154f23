"""Removing what is not needed any more: artifacts by rules, and whatever nothing refers to.

In use is an artifact whose lock `use.<hash>` somebody shares: a load, the loaded program until it is dropped, whoever
reads or publishes it. In use are all binaries while a build shares the lock `building`. Both end with the process,
however it ends. What is removed is first renamed into a staging directory, so that nobody sees half of it, and a pruner
that is killed leaves nothing that the next one does not find.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fxc.cache import index
from fxc.cache.artifact import Artifact
from fxc.cache.choice import Choice, Entry, Removal, Rules, choose
from fxc.cache.files import again, displace, io_errors
from fxc.cache.layout import MANIFEST, Layout, prune_formats
from fxc.cache.lock import BUILDING, PULLING, leftovers, lock, locks_work, staging, try_lock, use_of
from fxc.cache.publish import sweep
from fxc.capture_plan import beside
from fxc.errors import CacheIOError, FxcError
from fxc.manifest import Manifest

OWN_LOCKS = frozenset({"artifacts", "binaries", "index", "staging", "tuning", BUILDING, PULLING})


class Pruned(msgspec.Struct, frozen=True):
    """What `prune --json` prints."""

    removed: tuple[Removal, ...]
    in_use: tuple[str, ...]
    """Artifacts that would have gone, but are in use."""
    binaries: int
    """Removed binaries that no artifact refers to."""
    building: bool
    """Whether a build is running, so that all binaries stayed."""
    staging: int
    """Removed directories that dead processes left."""
    bytes: int
    """Of the artifacts that stay, and their binaries."""
    dry_run: bool


def prune(layout: Layout, bases: Sequence[Layout], rules: Rules, dry_run: bool) -> Pruned:
    """Remove artifacts by `rules`, then binaries and index entries that no artifact stands behind, staging directories
    of dead processes, unused locks and older formats."""
    if not layout.root.is_dir():
        return Pruned((), (), 0, False, 0, 0, dry_run)
    if not locks_work(layout):
        raise CacheIOError(
            f"{layout.root} cannot be pruned: its file system has no locks, so what is in use cannot be told",
            "prune it on the machine that the file system belongs to, or remove the directory when nobody uses it",
        )
    choice = choose(_entries(layout), rules, time.time())
    left = _leftovers(layout)
    if dry_run:
        gone = {removal.hash for removal in choice.removals}
        building = _is_building(layout)
        orphans = () if building else _orphans(layout, gone)
        return _report(choice, choice.removals, choice.in_use, len([*orphans]), building, left, dry_run)
    prune_formats(layout.root.parent)
    with staging(layout) as stage:  # making it removes what dead processes left
        removed = [removal for removal in choice.removals if _remove_artifact(layout, removal, stage)]
        with lock(layout, "artifacts"), io_errors("remove", layout.artifacts):
            sweep(layout.artifacts, stage)
        binaries = _remove_binaries(layout, stage)
    _drop_incoming(layout)
    _forget(layout, bases)
    _drop_locks(layout)
    stayed = {removal.hash for removal in choice.removals} - {removal.hash for removal in removed}
    in_use = (*choice.in_use, *sorted(stayed))
    return _report(choice, removed, in_use, binaries or 0, binaries is None, left, dry_run)


def _report(
    choice: Choice, removed: Iterable[Removal], in_use: Iterable[str], binaries: int, building: bool, left: int,
    dry_run: bool,
) -> Pruned:  # fmt: skip
    removed = tuple(removed)
    kept = sum(removal.bytes for removal in choice.removals) - sum(removal.bytes for removal in removed)
    return Pruned(removed, tuple(in_use), binaries, building, left, choice.bytes + kept, dry_run)


def _entries(layout: Layout) -> Iterator[Entry]:
    for hash in _names(layout.artifacts):
        path = layout.artifacts / hash
        with io_errors("read", path), suppress(FileNotFoundError):  # no artifact, or removed meanwhile
            used = (path / MANIFEST).stat().st_mtime
            manifest = _manifest(path)
            keys = manifest.binaries if manifest else ()
            files = _sizes(path)
            for key in keys:
                files |= _sizes(layout.binaries / key)
            yield Entry(hash, manifest, used, files, _is_held(layout, use_of(hash)))


def _sizes(directory: Path) -> dict[int, int]:
    found = {}
    for where, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(where, name))
                found[status.st_ino] = status.st_size
    return found


def _manifest(path: Path) -> Manifest | None:
    try:
        return Artifact.open(path).manifest
    except FxcError:
        return None


def _names(directory: Path) -> list[str]:
    with io_errors("read", directory):
        try:
            return sorted(again(lambda: os.listdir(directory)))
        except FileNotFoundError:
            return []


def _leftovers(layout: Layout) -> int:
    with lock(layout, "staging"), io_errors("read", layout.staging):
        return len(leftovers(layout)) + (bool(_names(layout.incoming)) and not _is_held(layout, PULLING))


def _drop_incoming(layout: Layout) -> None:
    """Remove what a pull that did not end has fetched."""
    with try_lock(layout, PULLING) as alone, io_errors("remove", layout.incoming):
        for name in _names(layout.incoming) if alone else ():
            (layout.incoming / name).unlink(missing_ok=True)


def _is_held(layout: Layout, name: str) -> bool:
    if not layout.lock(name).exists():
        return False
    with try_lock(layout, name) as free:
        return not free


def _is_building(layout: Layout) -> bool:
    return _is_held(layout, BUILDING)


def _remove_artifact(layout: Layout, removal: Removal, stage: Path) -> bool:
    """Whether it is gone: not where somebody came to use it since it was chosen."""
    place, name = layout.artifacts / removal.hash, use_of(removal.hash)
    with try_lock(layout, name) as unused:
        if not unused:
            return False
        with lock(layout, "artifacts"), io_errors("remove", place):
            try:
                if (place / MANIFEST).stat().st_mtime > removal.last_used:
                    return False
                displace(place, stage / removal.hash)
                beside(place).unlink(missing_ok=True)
            except FileNotFoundError:  # another one has pruned it
                return True
            layout.lock(name).unlink()
    return True


def _remove_binaries(layout: Layout, stage: Path) -> int | None:
    """How many were removed; None while a build is running."""
    with try_lock(layout, BUILDING) as alone:
        if not alone:
            return None
        with lock(layout, "binaries"), io_errors("remove", layout.binaries):
            orphans = [*_orphans(layout, frozenset())]
            for key in orphans:
                displace(layout.binaries / key, stage / f"binary.{key}")
    return len(orphans)


def _orphans(layout: Layout, gone: Iterable[str]) -> Iterator[str]:
    """Binaries that no artifact refers to but those that are `gone`. Which ones an unreadable artifact refers to cannot
    be told; it has them in itself too."""
    names = [hash for hash in _names(layout.artifacts) if hash not in {*gone}]
    manifests = [_manifest(layout.artifacts / hash) for hash in names]
    used = {key for manifest in manifests if manifest for key in manifest.binaries}
    return (key for key in _names(layout.binaries) if key not in used)


def _forget(layout: Layout, bases: Sequence[Layout]) -> None:
    """Remove index files none of whose artifacts is there, and times of use of what no base has."""
    for name in _names(layout.index):
        with lock(layout, "index"), io_errors("remove", layout.index):
            hashes = index.hashes(layout, name.removesuffix(".json"))
            if not any(index.has_artifact(place, hash) for place in (layout, *bases) for hash in hashes):
                (layout.index / name).unlink(missing_ok=True)
    for hash in _names(layout.used):
        if not any(index.has_artifact(base, hash) for base in bases):
            with suppress(OSError):
                (layout.used / hash).unlink()


def _drop_locks(layout: Layout) -> None:
    """Remove the files of locks that nobody holds or shares. That of an artifact stays: a reader makes none."""
    for file in _names(layout.locks):
        name = file.removesuffix(".lock")
        hash = name.removeprefix("use.")
        if name in OWN_LOCKS or (hash != name and index.has_artifact(layout, hash)):
            continue
        with try_lock(layout, name) as free:
            if free and not (hash != name and index.has_artifact(layout, hash)):
                layout.lock(name).unlink(missing_ok=True)
