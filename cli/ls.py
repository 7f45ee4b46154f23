"""`fxc ls`: what is in the cache."""

from __future__ import annotations

from fxc.cache import Cache
from fxc.cli import render, report
from fxc.cli.options import CacheDir, Json, Quiet, Verbose


def run(cache_dir: CacheDir = None, json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List artifacts with model, sizes, device, bytes, age and last use."""
    cache = Cache.open(cache_dir)
    entries = cache.list()
    if json:
        render.json_object({"artifacts": [report.listed(entry) for entry in entries]})
    elif entries:
        report.listing(entries)
    elif not quiet:
        render.line(f"no artifacts in {cache.root}")
