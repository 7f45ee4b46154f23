"""Where everything in the cache lies.

<cache dir>/                        --cache-dir, FXC_CACHE_DIR, or the platform's user cache folder
  v1/                               the format; a change is a new folder, older ones are pruned
    artifacts/<hash>/
      manifest.json                 without it the directory is not an artifact; its mtime is the artifact's last use
      manifest.sig                  a signature over its bytes, if somebody signed it
      rank_<r>_<d>/                 transformed_code.py, computation_graph.py, pieces.py, checks.json,
                                    constants.safetensors
        inductor/                   hard links into binaries/
    binaries/<key>/
      record.json                   what it was compiled from, and the digests of the files beside it
      <key>.so  <key>.json          the compiled piece; the second where it calls custom ops
    index/<direct key>.json         which artifacts a direct key stands for, and for which source files
    locks/<name>.lock               held through flock: the kernel lets go of those of a dead process
    locks/use.<hash>.lock           shared by whoever uses an artifact, held alone by whoever removes it
    staging/<random>/               what is being written; renamed into its place when whole
    staging/<random>.alive          locked as long as the process that writes there lives
    used/<hash>                     empty; its mtime is the last use of an artifact that lies in a read-only place
    incoming/<sha256>               what a pull has fetched and checked so far
    tuning/<device>.json            configurations of kernels that `fxc tune` has timed on such a device
    scratch/<name>/                 compilers' own caches; nothing depends on them

Directories 0700, files 0600. Nothing in `artifacts` and `binaries` is ever changed in place: a new directory is made
and takes the old one's place in one step.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fxc.cache.files import make_dirs, sync_dir
from fxc.errors import CacheIOError, UsageError
from fxc.manifest import FORMAT

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
RECORD = "record.json"
INDUCTOR = "inductor"


def cache_dir(directory: Path | None, environ: Mapping[str, str]) -> Path:
    """The cache directory: `directory`, else FXC_CACHE_DIR, else the platform's.

    Raises:
        CacheIOError: that is a file, or lies below one.
    """
    chosen = os.fspath(directory) if directory is not None else environ.get("FXC_CACHE_DIR")
    if not chosen:
        import platformdirs

        chosen = platformdirs.user_cache_dir("fxc", appauthor=False)
    path = Path(os.path.abspath(os.path.expanduser(chosen)))
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not there.is_dir():
        raise CacheIOError(f"the cache cannot be {path}: {there} is not a directory", "choose another place")
    return path


def base_dirs(environ: Mapping[str, str]) -> list[Path]:
    """The read-only places in FXC_CACHE_PATH, in order: absolute paths with colons between.

    Raises:
        UsageError: one is not absolute; what it means would depend on where a server was started.
    """
    found: list[Path] = []
    for name in filter(None, environ.get("FXC_CACHE_PATH", "").split(":")):
        path = Path(os.path.abspath(os.path.expanduser(name)))
        if not os.path.isabs(os.path.expanduser(name)):
            raise UsageError(f"FXC_CACHE_PATH names {name!r}, which is not absolute", f"write {path}")
        if path not in found:
            found.append(path)
    return found


def is_hash(name: str) -> bool:
    """Whether an artifact may have that name: what a file says must not lead elsewhere."""
    return re.fullmatch(r"[0-9a-f]{4,64}", name) is not None


class Layout(msgspec.Struct, frozen=True):
    """Paths below one format's folder."""

    root: Path

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def binaries(self) -> Path:
        return self.root / "binaries"

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def used(self) -> Path:
        return self.root / "used"

    @property
    def incoming(self) -> Path:
        return self.root / "incoming"

    @property
    def tuning(self) -> Path:
        return self.root / "tuning"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    def lock(self, name: str) -> Path:
        return self.locks / f"{name}.lock"

    def prepare(self) -> None:
        """Make the folders and prune those of older formats."""
        folders = (self.artifacts, self.binaries, self.index, self.locks, self.staging)
        if all(path.is_dir() for path in folders):
            return
        prune_formats(self.root.parent)
        for path in folders:
            make_dirs(path)
        sync_dir(self.root)


def prune_formats(directory: Path) -> None:
    """Remove folders of older formats; only what looks like ours, since the user may have named any directory."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        match = re.fullmatch(r"v(\d+)", path.name)
        if match and int(match[1]) < FORMAT and (path / "artifacts").is_dir() and (path / "locks").is_dir():
            shutil.rmtree(path, ignore_errors=True)
