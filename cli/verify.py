"""`fxc verify`: the digests of every file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fxc import refs
from fxc.cache import Artifact, Cache, Trust
from fxc.cli import progress, render
from fxc.cli.options import CacheDir, Jobs, Json, Quiet, Verbose, VerifyKey
from fxc.errors import DamagedError, UsageError


def run(
    ref: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL.YAML|HASH]", help="As for inspect; default: every artifact in the cache."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run every binary on this machine's device against eager, and note it.")
    ] = False,
    jobs: Jobs = None,
    verify_key: VerifyKey = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check the digests of every file of one artifact, or of all; with --run, also that its binaries are right here."""
    if run and ref is None:
        raise UsageError("--run, and no artifact is named", "fxc verify HASH --run")
    cache, trust = Cache.open(cache_dir), Trust.of(os.environ, verify_key)
    checked: list[dict[str, str | int | bool]] = []
    damaged: list[DamagedError] = []
    for name in [ref] if ref else [entry.hash for entry in cache.list()]:
        try:
            artifact = refs.find(name, cache_dir, trust=trust)
            files = artifact.verify()
        except DamagedError as error:
            damaged.append(error)
            continue
        if run:
            artifact = _run(artifact, cache, name, jobs, quiet=quiet, verbose=verbose)
        manifest = artifact.manifest
        checked.append(
            {"hash": manifest.hash, "path": str(artifact.path), "files": files, "verified": manifest.verified}
        )
        if not quiet:
            note = "" if manifest.verified else ", has not run on a device of its kind: fxc verify --run"
            render.line(f"{manifest.hash}  ok  {render.count(files, 'file')}{note}")
    if damaged:
        first, more = damaged[0], len(damaged) - 1
        raise type(first)(first.message + (f" (and {more} more damaged)" if more else ""), first.hint)
    if not checked and not quiet:
        render.line(f"no artifacts in {cache.root}")
    if json:
        render.json_object({"artifacts": checked})


def _run(artifact: Artifact, cache: Cache, ref: str, jobs: int | None, *, quiet: bool, verbose: bool) -> Artifact:
    """Imports torch."""
    from fxc import verification

    directory = Path(ref).resolve().parent if refs.is_spec(ref) else None
    with artifact.use(), progress.observer(quiet=quiet, verbose=verbose) as observer:
        verification.verify(artifact, cache, directory, jobs or verification.processes(), observer)
    return Artifact.open(artifact.path)
