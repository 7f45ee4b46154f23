"""Writing artifacts: a whole directory is staged and takes the old one's place in one step."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fxc import verified
from fxc.cache import binaries as store
from fxc.cache import signing
from fxc.cache.artifact import MEND, Artifact, is_safe
from fxc.cache.files import copy_file, displace, install, io_errors, link_file, make_dirs, sync_dir, write_file
from fxc.cache.layout import INDUCTOR, MANIFEST, SIGNATURE, Layout
from fxc.cache.listing import listed
from fxc.cache.lock import lock, share, staging, use_of
from fxc.errors import CacheMissError, DamagedError, FxcError, IncompatibleError, UsageError
from fxc.manifest import Factor, File, Manifest, Rank, encode

Files = Mapping[str, bytes | Path]


def publish(
    layout: Layout, bases: Sequence[Layout], manifest: Manifest, rank: Rank, files: Files, binaries: Iterable[str]
) -> Artifact:
    """Make the artifact, or add or replace a rank of one that is there; its other ranks stay.

    Readers see the old state or the new one, and so does whoever comes after a crash. A reader in the middle of the old
    one finds equal files: texts follow from the content key, and binaries come from the store. What `bases` have of it,
    binaries and other ranks, is copied first.
    """
    rank_dir = f"rank_{rank.rank}_{rank.data_parallel_rank}"
    place = layout.artifacts / manifest.hash
    with staging(layout) as stage:
        new = stage / manifest.hash
        with io_errors("write", place):
            make_dirs(new / rank_dir / INDUCTOR)
            listed = _write(new / rank_dir, files) | _link(layout, bases, new / rank_dir / INDUCTOR, binaries)
        listed = {f"{rank_dir}/{name}": entry for name, entry in sorted(listed.items())}
        ranks = {rank_dir: msgspec.structs.replace(rank, files=listed)}
        return _install(layout, bases, msgspec.structs.replace(manifest, ranks=ranks), new, stage)


def adopt(layout: Layout, found: Artifact, stage: Path) -> Artifact:
    """Take in an artifact from elsewhere, which lies in the staging directory `stage`, every file of it checked. Its
    binaries are shared with others, like those that were compiled here."""
    names = {name.rpartition("/")[2]: name for rank in found.manifest.ranks.values() for name in rank.files}
    files = listed(found.manifest)
    records = {
        key: store.Record(binary, {name: files[names[name]] for name in (f"{key}.so", f"{key}.json") if name in names})
        for key, binary in found.manifest.binaries.items()
        if f"{key}.so" in names
    }
    store.share(layout, records, lambda name: found.path / names[name], stage)
    return _install(layout, (), found.manifest, found.path, stage, found)


def new_rank(name: str, world_size: int, direct: Iterable[Factor] = ()) -> Rank:
    """The record of a rank, no files in it yet."""
    match = re.fullmatch(r"rank_(0|[1-9]\d*)_(0|[1-9]\d*)", name)
    if not match:
        raise UsageError(f"rank directory {name!r}: expected rank_<r>_<d>")
    return Rank(
        rank=int(match[1]), data_parallel_rank=int(match[2]), world_size=world_size, files={}, direct=tuple(direct)
    )


def _install(
    layout: Layout, bases: Sequence[Layout], manifest: Manifest, new: Path, stage: Path, found: Artifact | None = None
) -> Artifact:
    """Add the ranks that are there already, write the manifest, and put `new` in its place. The manifest of an artifact
    that was `found` elsewhere is written as it was, if nothing is added; to one that is signed nothing is."""
    place = layout.artifacts / manifest.hash
    # In this order, as prune takes them: whoever prunes this artifact is waited for.
    with share(layout, use_of(manifest.hash)), lock(layout, "artifacts"), io_errors("write", place):
        sweep(layout.artifacts, stage)
        full = manifest
        if found is None or not found.signature:
            full = _keep(place, new, full, link_file)
        for base in bases:
            full = _keep(base.artifacts / manifest.hash, new, full, copy_file)
        if found is None or full != manifest:
            found = Artifact(place, full, encode(full))
        elif not found.signature:
            found = _with_signature(found, place)
        write_file(new / MANIFEST, found.data)
        if found.signature:
            write_file(new / SIGNATURE, found.signature)
        install(new, place)
    return msgspec.structs.replace(found, path=place)


def _with_signature(found: Artifact, place: Path) -> Artifact:
    """With that of the same manifest in the cache: what comes without one is no reason to lose it."""
    try:
        old = Artifact.open(place)
    except (CacheMissError, DamagedError, IncompatibleError):
        return found
    return msgspec.structs.replace(found, signature=old.signature) if old.data == found.data else found


def sign(artifact: Artifact, key: Path, stage: Path) -> Artifact:
    """Put a signature beside the manifest, in one step. Called under the lock `artifacts`."""
    now = Artifact.open(artifact.path)
    if now.data != artifact.data:
        raise DamagedError(f"{artifact.path} was replaced while it was checked", "sign it again")
    signed = msgspec.structs.replace(now, signature=signing.sign(now.data, key))
    with io_errors("write", artifact.path / SIGNATURE):
        write_file(stage / SIGNATURE, signed.signature)
        os.replace(stage / SIGNATURE, artifact.path / SIGNATURE)
        sync_dir(artifact.path)
    return signed


def amend(artifact: Artifact, manifest: Manifest, stage: Path) -> Artifact:
    """Replace the manifest by another one of the same files, in one step; a signature of the old one goes. Called under
    the lock `artifacts`."""
    now = Artifact.open(artifact.path)
    if now.data != artifact.data:
        raise DamagedError(f"{artifact.path} was replaced meanwhile", "try again")
    data = encode(manifest)
    with io_errors("write", artifact.path / MANIFEST):
        write_file(stage / MANIFEST, data)
        (artifact.path / SIGNATURE).unlink(missing_ok=True)
        os.replace(stage / MANIFEST, artifact.path / MANIFEST)
        sync_dir(artifact.path)
    return Artifact(artifact.path, manifest, data)


def _write(directory: Path, files: Files) -> dict[str, File]:
    for name, data in files.items():
        if not is_safe(name):
            raise UsageError(f"file name {name!r} leaves the artifact")
        make_dirs((directory / name).parent)
        if isinstance(data, bytes):
            write_file(directory / name, data)
        else:
            copy_file(data, directory / name)
    return {name: store.measure(directory / name) for name in files}


def _link(layout: Layout, bases: Sequence[Layout], directory: Path, binaries: Iterable[str]) -> dict[str, File]:
    listed: dict[str, File] = {}
    for key in dict.fromkeys(binaries):
        store.adopt(layout, bases, key)
        for name, expected in store.load(layout, key).files.items():
            with suppress(FileNotFoundError):
                link_file(layout.binaries / key / name, directory / name)
            if not (directory / name).exists() or store.measure(directory / name) != expected:
                raise DamagedError(f"{layout.binaries / key / name} was damaged or removed during the build", MEND)
            listed[f"{INDUCTOR}/{name}"] = expected
    return listed


def _keep(place: Path, new: Path, manifest: Manifest, take: Callable[[Path, Path], None]) -> Manifest:
    """With the ranks that only the artifact at `place` has, and its note that the binaries have run. Files of those
    ranks are linked or copied into the new one; what is damaged stays so. A direct key of theirs is kept where it goes
    with the sources of the new manifest."""
    try:
        old = Artifact.open(place).manifest
    except (CacheMissError, DamagedError, IncompatibleError):
        return manifest
    if old.binaries.keys() != manifest.binaries.keys():  # made with other options, as without a device and with one
        return manifest
    others = {name: rank for name, rank in old.ranks.items() if name not in manifest.ranks}
    if old.sources != manifest.sources:
        others = {name: msgspec.structs.replace(rank, direct=()) for name, rank in others.items()}
    for name in (name for rank in others.values() for name in rank.files):
        make_dirs((new / name).parent)
        with suppress(FileNotFoundError):
            take(place / name, new / name)
    return verified.merge(old, manifest, others)


def sweep(artifacts: Path, stage: Path) -> None:
    """Remove directories without a manifest, which are no artifacts; a young one may be copied in just now."""
    for path in artifacts.iterdir():
        with suppress(OSError, FxcError):  # others may be faster
            if not (path / MANIFEST).exists() and time.time() - path.stat().st_mtime > 3600:
                displace(path, stage / f"{path.name}.swept")
