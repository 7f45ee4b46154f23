"""`fxc tune`: times the kernels of an artifact on this machine's GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fxc import refs
from fxc.cache import Cache, Trust
from fxc.cli import progress, render, report, streams
from fxc.cli.options import CacheDir, Json, Quiet, Ref, Verbose, VerifyKey


def run(
    ref: Ref,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE.json", help="Write the record there, too.")
    ] = None,
    verify_key: VerifyKey = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Time the candidates of each kernel on this GPU; builds with the record take the fastest."""
    artifact = refs.find(ref, cache_dir, trust=Trust.of(os.environ, verify_key))
    from fxc.tune import tune

    directory = Path(ref).resolve().parent if refs.is_spec(ref) else None
    with artifact.use(), streams.result_only(), progress.observer(quiet=quiet, verbose=verbose) as observer:
        tuned = tune(artifact, Cache.open(cache_dir), directory, observer, output)
    if not quiet:
        report.tuned(tuned, verbose)
    if json:
        render.json_object(tuned)
