"""From a remote cache into this one: missing contents only, put together in a staging directory, published whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from fxc.cache import binaries, publish
from fxc.cache.artifact import Artifact
from fxc.cache.contents import Progress
from fxc.cache.files import io_errors, link_file, make_dirs
from fxc.cache.layout import Layout
from fxc.cache.listing import listed
from fxc.cache.lock import PULLING, lock, staging
from fxc.cache.remote import Remote
from fxc.cache.trust import Trust, check
from fxc.errors import FxcError
from fxc.manifest import File, Manifest


def pull(layout: Layout, remote: Remote, found: Artifact, trust: Trust, progress: Progress) -> Artifact:
    """Take in an artifact, whose manifest was `found` at the remote. What has come when it ends half-way is in
    `incoming/`, and does not travel again.

    Raises:
        DamagedError: something is not what its digest says, or is not trusted.
        CacheIOError: the remote cannot be read, or the cache not written.
    """
    hash = found.manifest.hash
    expected = listed(found.manifest)
    layout.prepare()
    with io_errors("write", layout.incoming):
        make_dirs(layout.incoming)
    with staging(layout) as stage, lock(layout, PULLING):  # the others of this machine wait, and find it all
        new = stage / hash
        blobs = stage / "blobs"
        with io_errors("write", new):
            make_dirs(new)
            make_dirs(blobs)
            _reuse(layout, found.manifest, expected.values(), blobs)
        here = {path.name for path in blobs.iterdir()}
        missing = [file for file in expected.values() if file.sha256 not in here]
        remote.fetch(hash, missing, layout.incoming, stage, progress)
        with io_errors("write", new):
            for name, file in expected.items():
                source = blobs if file.sha256 in here else layout.incoming
                make_dirs((new / name).parent)
                link_file(source / file.sha256, new / name)
        artifact = publish.adopt(
            layout, check(Artifact(new, found.manifest, found.data, found.signature), trust), stage
        )
        for file in missing:
            with suppress(OSError):
                os.unlink(layout.incoming / file.sha256)
    return artifact


def _reuse(layout: Layout, manifest: Manifest, files: Iterable[File], blobs: Path) -> None:
    """Link what this cache has already, by digest: binaries, and files of another build of the same artifact."""
    wanted = set(files)
    for path, file in _have(layout, manifest):
        if file in wanted and not (blobs / file.sha256).exists():
            with suppress(OSError):
                link_file(path, blobs / file.sha256)
                if binaries.measure(blobs / file.sha256) != file:
                    os.unlink(blobs / file.sha256)


def _have(layout: Layout, manifest: Manifest) -> Iterator[tuple[Path, File]]:
    for key in manifest.binaries.keys() & set(os.listdir(layout.binaries)):
        with suppress(FxcError):
            for name, file in binaries.load(layout, key).files.items():
                yield layout.binaries / key / name, file
    with suppress(FxcError):
        artifact = Artifact.open(layout.artifacts / manifest.hash)
        for name, file in listed(artifact.manifest).items():
            yield artifact.path / name, file
