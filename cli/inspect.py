"""`fxc inspect`: what an artifact holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxc import refs
from fxc.cache import Artifact
from fxc.cli import output_file, render, report, streams
from fxc.cli.options import CacheDir, Json, Quiet, Ref, Verbose
from fxc.errors import UsageError
from fxc.manifest import to_data


def run(
    ref: Ref,
    code: Annotated[bool, typer.Option("--code", help="Print transformed_code.py instead.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Print computation_graph.py instead.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained page with pictures; - is stdout."),
    ] = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what an artifact holds: model, sizes, pieces, passes, binaries, machine, timings, key, proof."""
    if code + graph + json + (html == output_file.STDOUT) > 1:
        several = "--code, --graph, --json and --html - print different things to stdout"
        raise UsageError(several, "give one of them")
    if html is not None:
        output_file.check(html, "--html")
    artifact = refs.find(ref, cache_dir)
    if html is not None:
        _write_page(artifact, html, quiet)
    if code or graph:
        streams.write(_source(artifact, "transformed_code.py" if code else "computation_graph.py"))
    elif json:
        render.json_object(to_data(artifact.manifest))
    elif html is None:
        report.show(artifact, verbose=verbose)


def _write_page(artifact: Artifact, file: Path, quiet: bool) -> None:
    from fxc.cli.page import page

    text = page(artifact)
    output_file.write(file, text, "--html")
    if not quiet and file != output_file.STDOUT:
        render.line(f"wrote {file}: {render.size_bytes(len(text.encode()))}")


def _source(artifact: Artifact, name: str) -> str:
    """A source file of the first rank; all ranks of one artifact have the same graph."""
    first = min(artifact.manifest.ranks, default="rank_0_0")
    return artifact.read(f"{first}/{name}").decode()
