"""`fxc export`: one artifact in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxc import refs
from fxc.cache import Cache
from fxc.cli import render, streams
from fxc.cli.options import CacheDir, Json, Quiet, Ref, Verbose


def run(
    ref: Ref,
    file: Annotated[Path, typer.Argument(metavar="FILE.TAR", help="What to write; replaced in one step.")],
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write an artifact into a tar file, the same bytes for the same artifact; prints the hash."""
    artifact = refs.find(ref, cache_dir)
    with artifact.use():
        written = Cache.open(cache_dir).export(artifact, file)
    if not quiet:
        render.line(f"wrote {file}: {render.size_bytes(written.bytes)}, sha256 {written.sha256}")
    hash = artifact.manifest.hash
    if json:
        render.json_object({"hash": hash, "file": str(file), "bytes": written.bytes, "sha256": written.sha256})
    else:
        streams.write(f"{hash}\n")
