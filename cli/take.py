"""`fxc import`: what `fxc export` has written, into the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fxc import identity
from fxc.cache import Cache, Trust
from fxc.cli import render, streams
from fxc.cli.options import CacheDir, Json, Quiet, Verbose, VerifyKey


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.TAR", help="What `fxc export` has written.")],
    verify_key: VerifyKey = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check every digest of an exported artifact and take it into the cache; prints the hash."""
    cache = Cache.open(cache_dir)
    artifact = cache.import_file(file, Trust.of(os.environ, verify_key))
    manifest = artifact.manifest
    files = sum(len(rank.files) for rank in manifest.ranks.values())
    identity.remember_all(cache, manifest)
    if not quiet:
        render.line(f"imported {manifest.model}: {render.count(files, 'file')}")
    if json:
        render.json_object({"hash": manifest.hash, "path": str(artifact.path), "files": files})
    else:
        streams.write(f"{manifest.hash}\n")
