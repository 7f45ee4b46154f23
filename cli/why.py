"""`fxc why`: hit or miss, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fxc import refs
from fxc.cli import render, streams
from fxc.cli.options import (
    CacheDir,
    DpRank,
    Json,
    Level,
    March,
    Overrides,
    Quiet,
    RankOption,
    TargetOption,
    Tuning,
    Verbose,
    WorldSize,
    check_rank,
)
from fxc.errors import UsageError

if TYPE_CHECKING:
    from fxc.why import Difference, Why

LINES = 20
"""Of a difference between two texts, and of binaries, without `-v`."""


def run(
    ref: Annotated[str, typer.Argument(metavar="MODEL.YAML|HASH", help="What is looked for.")],
    other: Annotated[
        str | None, typer.Argument(metavar="[HASH]", help="What to compare with; default: the nearest artifact.")
    ] = None,
    no_trace: Annotated[bool, typer.Option("--no-trace", help="Compare what can be seen without one.")] = False,
    target: TargetOption = None,
    march: March = None,
    tuning: Tuning = "auto",
    overrides: Overrides = None,
    level: Level = None,
    rank: RankOption = None,
    world_size: WorldSize = None,
    dp_rank: DpRank = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say whether a model.yaml is in the cache and why not, or how two artifacts differ. Compiles nothing."""
    check_rank(rank, world_size)
    from fxc import why

    if refs.is_spec(ref):
        with streams.result_only():
            found = why.explain(
                Path(ref), other=other, overrides=tuple(overrides or ()), level=level, rank=rank,
                world_size=world_size, dp_rank=dp_rank, cache_dir=cache_dir, trace=not no_trace, tuning=tuning,
                target=target, march=march,
            )  # fmt: skip
    elif other is None or refs.is_spec(other):
        raise UsageError("two hashes are compared, or a model.yaml with a hash", "fxc why MODEL.YAML [HASH]")
    else:
        found = why.compare(
            refs.find(ref, cache_dir, overrides=overrides or (), level=level), refs.find(other, cache_dir)
        )
    if not quiet:
        say(found, verbose=verbose)
    if json:
        render.json_object(found)


def say(why: Why, *, verbose: bool) -> None:
    """A miss in words."""
    render.line(f"{'hit' if why.hit else 'miss'}: {why.reason}")
    if why.nearest and why.nearest != why.hash:
        render.line(f"nearest: {why.nearest}")
    for entry in why.changed:
        _difference(entry, verbose)
    if why.factors:
        render.line("parts of the name that differ:")
    for entry in why.factors:
        _difference(entry, verbose)
    if why.compile:
        about = "about " if why.hash is None else ""
        render.line(f"to compile: {about}{len(why.compile)}; the artifact has {render.count(why.binaries, 'binary')}")
        for needed in why.compile if verbose else why.compile[:LINES]:
            took = "" if needed.seconds is None else f"  {render.duration(needed.seconds)}"
            render.line(f"  {needed.piece}{took}")
    if not why.hit and why.seconds is not None:
        render.line(f"a build takes about {render.duration(why.seconds)}, going by the nearest artifact")
    if why.hash is None and any(entry.name.startswith("source.") for entry in why.changed):
        render.line("`fxc why` with the same arguments traces the model, and shows the lines of its graph that differ")


def _difference(entry: Difference, verbose: bool) -> None:
    if entry.lines:
        render.line(f"  {entry.name}:")
        for line in entry.lines if verbose else entry.lines[:LINES]:
            render.line(f"    {line}")
        if len(entry.lines) > LINES and not verbose:
            render.line(f"    ... {len(entry.lines) - LINES} more lines, with -v")
    elif entry.name.startswith(("source.", "environment.")):  # digests tell people nothing
        word = "is gone" if entry.new in ("", "is gone") else "changed" if entry.old else "is new"
        render.line(f"  {entry.name}: {word}")
    else:
        render.line(f"  {entry.name}: {entry.old or 'nothing'} -> {entry.new or 'nothing'}")
