"""`fxc pull`: an artifact from a remote cache."""

from __future__ import annotations

import os
from pathlib import Path

from fxc import refs, share
from fxc.cache import Cache, Trust
from fxc.cli import progress, render, streams
from fxc.cli.options import (
    CacheDir,
    DpRank,
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
from fxc.errors import CacheMissError
from fxc.ranks import ranks
from fxc.spec import load_spec


def run(
    ref: Ref,
    remote: RemoteOption = None,
    verify_key: VerifyKey = None,
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
    """Fetch what this cache lacks of an artifact, check every digest, and take it in; prints the hash."""
    check_rank(rank, world_size)
    with progress.observer(quiet=quiet, verbose=verbose) as observer:
        trust = Trust.of(os.environ, verify_key)
        shared = share.require(remote, Cache.open(cache_dir), observer, trust)
        if refs.is_spec(ref):
            path = Path(ref)
            spec = load_spec(path, overrides or (), level)
            hash = shared.find(spec, path.resolve().parent, ranks(rank, world_size, dp_rank))
            if hash is None:
                raise CacheMissError(f"{path}, as it is now, is not in {shared.remote.url}", "`fxc push` puts it there")
        else:
            hash = shared.remote.resolve(ref)
        artifact, moved = shared.pull(hash)
    if not quiet:
        render.line(f"pulled: {render.size_bytes(moved)} from {shared.remote.url}")
    if json:
        render.json_object({"hash": hash, "path": str(artifact.path), "remote": shared.remote.url, "bytes": moved})
    else:
        streams.write(f"{hash}\n")
