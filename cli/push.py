"""`fxc push`: an artifact to a remote cache."""

from __future__ import annotations

from typing import Annotated

import typer

from fxc import refs, share
from fxc.cache import Cache
from fxc.cli import progress, render, streams
from fxc.cli.options import CacheDir, Json, Quiet, Ref, RemoteOption, Verbose


def run(
    ref: Ref,
    remote: RemoteOption = None,
    force: Annotated[bool, typer.Option("--force", help="Upload what seems to be there, too.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Upload what a remote cache lacks of an artifact; prints the hash."""
    artifact = refs.find(ref, cache_dir)
    with artifact.use(), progress.observer(quiet=quiet, verbose=verbose) as observer:
        shared = share.require(remote, Cache.open(cache_dir), observer)
        sent = shared.push(artifact, force=force)
    hash = artifact.manifest.hash
    if not quiet:
        what = f"{render.size_bytes(sent)} to" if sent else "all of it is at"
        render.line(f"pushed: {what} {shared.remote.url}")
    if json:
        render.json_object({"hash": hash, "remote": shared.remote.url, "bytes": sent})
    else:
        streams.write(f"{hash}\n")
