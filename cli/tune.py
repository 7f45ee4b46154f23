"""`fxc tune`: times the kernels of an artifact on this machine's GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fxc import refs
from fxc.cache import Cache, Trust
from fxc.cli import output_file, progress, render, report, streams
from fxc.cli.options import CacheDir, Json, Quiet, Ref, Verbose, VerifyKey
from fxc.errors import UsageError


def run(
    ref: Ref,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE.json", help="Write the record there, too; - is stdout.")
    ] = None,
    verify_key: VerifyKey = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Time the candidates of each kernel on this GPU; builds with the record take the fastest."""
    if output == output_file.STDOUT and json:
        raise UsageError("--json and --output - print different things to stdout", "give one of them")
    if output is not None:
        output_file.check(output, "--output")
    artifact = refs.find(ref, cache_dir, trust=Trust.of(os.environ, verify_key))
    from fxc import tuning
    from fxc.tune import tune

    cache = Cache.open(cache_dir)
    directory = Path(ref).resolve().parent if refs.is_spec(ref) else None
    with artifact.use(), streams.result_only(), progress.observer(quiet=quiet, verbose=verbose) as observer:
        tuned = tune(artifact, cache, directory, observer)
    if output is not None:
        text = tuning.encode(tuning.stored(cache, artifact.manifest.target)).decode()
        output_file.write(output, text, "--output", f"what was timed is in {tuned.record}" if tuned.record else "")
    if not quiet:
        report.tuned(tuned, verbose)
    if json:
        render.json_object(tuned)
