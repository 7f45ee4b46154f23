"""`fxc verify`: the digests of every file."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fxc import refs
from fxc.cache import Cache, Trust
from fxc.cli import render
from fxc.cli.options import CacheDir, Json, Quiet, Verbose, VerifyKey
from fxc.errors import DamagedError


def run(
    ref: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL.YAML|HASH]", help="As for inspect; default: every artifact in the cache."),
    ] = None,
    verify_key: VerifyKey = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check the digests of every file of one artifact, or of all."""
    cache, trust = Cache.open(cache_dir), Trust.of(os.environ, verify_key)
    checked: list[dict[str, str | int]] = []
    damaged: list[DamagedError] = []
    for name in [ref] if ref else [entry.hash for entry in cache.list()]:
        try:
            artifact = refs.find(name, cache_dir, trust=trust)
            files = artifact.verify()
        except DamagedError as error:
            damaged.append(error)
            continue
        checked.append({"hash": artifact.manifest.hash, "path": str(artifact.path), "files": files})
        if not quiet:
            render.line(f"{artifact.manifest.hash}  ok  {render.count(files, 'file')}")
    if damaged:
        first, more = damaged[0], len(damaged) - 1
        raise type(first)(first.message + (f" (and {more} more damaged)" if more else ""), first.hint)
    if not checked and not quiet:
        render.line(f"no artifacts in {cache.root}")
    if json:
        render.json_object({"artifacts": checked})
