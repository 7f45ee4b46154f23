"""`fxc inspect`: what an artifact holds."""

from __future__ import annotations

from typing import Annotated

import typer

from fxc import refs
from fxc.cache import Artifact
from fxc.cli import render, report, streams
from fxc.cli.options import CacheDir, Json, Quiet, Ref, Verbose
from fxc.errors import UsageError
from fxc.manifest import to_data


def run(
    ref: Ref,
    code: Annotated[bool, typer.Option("--code", help="Print transformed_code.py instead.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Print computation_graph.py instead.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what an artifact holds: model, sizes, pieces, passes, binaries, machine, timings, key, proof."""
    if code + graph + json > 1:
        raise UsageError("--code, --graph and --json print different things to stdout", "give one of them")
    artifact = refs.find(ref, cache_dir)
    if code or graph:
        streams.write(_source(artifact, "transformed_code.py" if code else "computation_graph.py"))
    elif json:
        render.json_object(to_data(artifact.manifest))
    else:
        report.show(artifact, verbose=verbose)


def _source(artifact: Artifact, name: str) -> str:
    """A source file of the first rank; all ranks of one artifact have the same graph."""
    first = min(artifact.manifest.ranks, default="rank_0_0")
    return artifact.read(f"{first}/{name}").decode()
