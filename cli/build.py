"""`fxc build`: trace, partition, run passes, compile, prove, publish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fxc import share
from fxc.cache import Cache
from fxc.cli import progress, render, report, streams
from fxc.cli.options import (
    CacheDir,
    DpRank,
    Executor,
    Jobs,
    Json,
    Level,
    March,
    Overrides,
    Quiet,
    RankOption,
    RemoteOption,
    TargetOption,
    Tuning,
    Verbose,
    WorldSize,
    check_rank,
)
from fxc.errors import UsageError


def run(
    model: Annotated[Path, typer.Argument(metavar="MODEL.YAML", help="What to build.")],
    overrides: Overrides = None,
    level: Level = None,
    jobs: Jobs = None,
    executor: Executor = "local",
    force: Annotated[bool, typer.Option("--force", help="Rebuild what is in the cache.")] = False,
    no_prove: Annotated[bool, typer.Option("--no-prove", help="Do not compare with eager.")] = False,
    target: TargetOption = None,
    march: March = None,
    tuning: Tuning = "auto",
    remote: RemoteOption = None,
    push: Annotated[bool, typer.Option("--push", help="Upload the artifact to the remote cache afterwards.")] = False,
    rank: RankOption = None,
    world_size: WorldSize = None,
    dp_rank: DpRank = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compile a model; prints the hash of the artifact."""
    check_rank(rank, world_size)
    if push and not (remote or os.environ.get(share.VARIABLE)):
        raise UsageError("--push, and no remote cache is named", f"give --remote URL or set {share.VARIABLE}")
    from fxc import pipeline

    with streams.result_only(), progress.observer(quiet=quiet, verbose=verbose) as observer:
        result = pipeline.build(
            model, overrides=tuple(overrides or ()), level=level, jobs=jobs, force=force, prove=not no_prove,
            rank=rank, world_size=world_size, dp_rank=dp_rank, cache_dir=cache_dir, remote=remote, executor=executor,
            observer=observer, target=target, march=march, tuning=tuning,
        )  # fmt: skip
        if push:
            cache = Cache.open(cache_dir)
            with cache.use(result.hash):
                share.require(remote, cache, observer).push(cache.artifact(result.hash))
    if not quiet:
        report.built(result)
    if json:
        render.json_object(result)
    else:
        streams.write(f"{result.hash}\n")
