"""`fxc warm`: make this machine ready, and prove it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fxc import refs
from fxc.cli import amounts, progress, render, report, streams
from fxc.cli import why as words
from fxc.cli.options import (
    CacheDir,
    DpRank,
    Jobs,
    Json,
    Level,
    Overrides,
    Quiet,
    RankOption,
    Ref,
    RemoteOption,
    Verbose,
    VerifyKey,
    WorldSize,
    check_rank,
)
from fxc.errors import CacheMissError, FxcError, UsageError


def run(
    ref: Ref,
    overrides: Overrides = None,
    level: Level = None,
    jobs: Jobs = None,
    require_hit: Annotated[bool, typer.Option("--require-hit", help="Exit 3 instead of building on a miss.")] = False,
    require_verified: Annotated[
        bool, typer.Option("--require-verified", help="Exit 5 if it has not run on a device of its kind.")
    ] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Stop after loading.")] = False,
    verify_key: VerifyKey = None,
    remote: RemoteOption = None,
    wait: Annotated[
        str, typer.Option("--wait", metavar="1h", help="How long to wait for another process that builds the same.")
    ] = "1h",
    rank: RankOption = None,
    world_size: WorldSize = None,
    dp_rank: DpRank = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="all|R,R", help="Several ranks, one after another, in one call.")
    ] = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Look up (or build), check, load and run one step per size; prints the hash."""
    check_rank(rank, world_size)
    if rank is not None and ranks is not None:
        raise UsageError("--rank and --ranks: expected one of them")
    from fxc.ready import WarmResult, warm
    from fxc.ready_ranks import RanksResult, warm_ranks

    with streams.result_only(), progress.observer(quiet=quiet, verbose=verbose) as observer:
        options: dict[str, Any] = {"overrides": tuple(overrides or ()), "level": level, "cache_dir": cache_dir}
        options |= {"world_size": world_size, "dp_rank": dp_rank}
        more: dict[str, Any] = {"jobs": jobs, "require_hit": require_hit, "run": not no_run, "verify_key": verify_key}
        more |= {"require_verified": require_verified}
        more |= {"remote": remote, "wait": amounts.seconds(wait, "--wait"), "observer": observer}
        result: WarmResult | RanksResult
        try:
            if ranks is None:
                result = warm(ref, rank=rank, **more, **options)
            else:
                result = warm_ranks(ref, ranks, **more, **options)
        except CacheMissError:
            if not quiet and refs.is_spec(ref) and ranks is None:
                _say_why(Path(ref), verbose, options | {"rank": rank})
            raise
    if not quiet:
        report.warmed(result) if isinstance(result, WarmResult) else report.ranks_warmed(result)
    if json:
        render.json_object(result)
    else:
        hashes = [entry.hash for entry in ([result] if isinstance(result, WarmResult) else result.ranks)]
        streams.write("".join(f"{hash}\n" for hash in dict.fromkeys(hashes)))


def _say_why(path: Path, verbose: bool, options: dict[str, Any]) -> None:
    """What can be told without a trace: a start-up script waits, and may not even have the model's packages."""
    from fxc import why

    with suppress(FxcError):
        words.say(why.explain(path, trace=False, **options), verbose=verbose)
