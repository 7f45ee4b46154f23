"""Makes a machine ready for several ranks of a job, one after another."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from fxc import ready, refs
from fxc.cache import Cache, Trust
from fxc.errors import CacheMissError, FxcError, UsageError
from fxc.manifest import Manifest
from fxc.progress import Observer
from fxc.ranks import Ranks, number, ranks
from fxc.ready import WarmResult
from fxc.share import Shared

ALL = "all"


class RankResult(WarmResult, frozen=True):
    """What warming one of several ranks gave."""

    rank: int
    world_size: int
    dp_rank: int


class RanksResult(msgspec.Struct, frozen=True):
    """What `warm --ranks --json` prints."""

    ready: bool
    ranks: list[RankResult]
    seconds: dict[str, float]
    """total."""


def warm_ranks(
    ref: str | Path, which: str, *, overrides: Iterable[str] = (), level: int | None = None,
    world_size: int | None = None, dp_rank: int | None = None, verify_key: Path | None = None,
    remote: str | None = None, cache_dir: Path | None = None, observer: Observer | None = None, **options: Any,
) -> RanksResult:  # fmt: skip
    """`ready.warm` for each rank, all on the device that is the current one.

    Args:
        which: `all`, which is every rank of the world for a model.yaml and every directory of a built artifact, or
            numbers with commas between.
        options: further ones of `warm`.

    Raises:
        UsageError: `which` is neither, or a model.yaml came without the size of its world.
        FxcError: what `warm` raises, with the rank in its message; the ranks before it are ready.
    """
    start = time.perf_counter()
    observer = observer or Observer()
    wanted = parse(which)
    overrides = tuple(overrides)
    if refs.is_spec(ref):
        places = of_world(wanted, number(world_size, "WORLD_SIZE"), dp_rank)
    else:
        trust = Trust.of(os.environ, verify_key)
        shared = Shared.open(remote, Cache.open(cache_dir), observer, trust)
        artifact = ready.look_up(ref, cache_dir, True, shared, trust=trust, overrides=overrides, level=level)
        assert artifact is not None
        places = of_artifact(wanted, artifact.manifest, world_size, dp_rank)
    results = []
    for place in places:
        observer.note(f"rank {place.label}")
        try:
            result = ready.warm(
                ref, overrides=overrides, level=level, rank=place.rank, world_size=place.world_size,
                dp_rank=place.data_parallel_rank, verify_key=verify_key, remote=remote, cache_dir=cache_dir,
                observer=observer, **options,
            )  # fmt: skip
        except FxcError as error:
            raise type(error)(f"rank {place.label}: {error.message}", error.hint) from error
        own = {"rank": place.rank, "world_size": place.world_size, "dp_rank": place.data_parallel_rank}
        results.append(msgspec.convert(msgspec.structs.asdict(result) | own, RankResult))
    return RanksResult(True, results, {"total": time.perf_counter() - start})


def parse(which: str) -> list[int] | None:
    """Numbers in the order given, each once; None for all.

    Raises:
        UsageError: it is neither.
    """
    if which == ALL:
        return None
    words = which.split(",")
    if not all(re.fullmatch("[0-9]+", word) for word in words):
        raise UsageError(f"--ranks {which!r}: expected all, or numbers with commas between", "--ranks 0,1")
    return list(dict.fromkeys(map(int, words)))


def of_world(wanted: list[int] | None, world_size: int | None, dp_rank: int | None) -> list[Ranks]:
    """The ranks of a job of that size.

    Raises:
        UsageError: its size is not known, or a rank is outside of it.
    """
    if world_size is None:
        hint = "give the number of processes: --world-size or WORLD_SIZE"
        raise UsageError("--ranks of a model.yaml are those of a world whose size is not given", hint)
    return [ranks(rank, world_size, dp_rank) for rank in (range(world_size) if wanted is None else wanted)]


def of_artifact(
    wanted: list[int] | None, manifest: Manifest, world_size: int | None, dp_rank: int | None
) -> list[Ranks]:
    """The ranks that an artifact was built for.

    Raises:
        CacheMissError: it has none of those, or not one of them.
    """
    there = []
    for name, rank in manifest.ranks.items():
        numbers = re.fullmatch("rank_([0-9]+)_([0-9]+)", name)
        if numbers and dp_rank in (None, int(numbers[2])) and world_size in (None, rank.world_size):
            there.append(Ranks(int(numbers[1]), rank.world_size, int(numbers[2])))
    there.sort(key=lambda place: (place.rank, place.data_parallel_rank))
    chosen = [place for place in there if wanted is None or place.rank in wanted]
    missing = sorted(set(wanted or ()) - {place.rank for place in there})
    if missing or not chosen:
        of = "" if world_size is None else f" of a world of {world_size}"
        what = f"rank {missing[0]}{of}" if missing else f"rank{of}" if of else f"data-parallel rank {dp_rank}"
        names = ", ".join(sorted(manifest.ranks)) or "none"
        raise CacheMissError(f"artifact {manifest.hash} has no {what}; its ranks are: {names}", "build it")
    return chosen
