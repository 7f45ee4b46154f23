"""`fxc doctor`: what a build and a load need on this machine."""

from __future__ import annotations

import typer

from fxc.cli import checks, render
from fxc.cli.options import CacheDir, Json, Quiet, Verbose


def run(cache_dir: CacheDir = None, json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Check what a build and a load need on this machine; exit 1 if something needed is not there."""
    found: list[checks.Check] = []
    for check in checks.every(cache_dir):
        found.append(check)
        if not quiet or (check.needed and not check.ok):
            mark = "ok" if check.ok else "NO" if check.needed else "--"
            render.line(f"{mark:<3} {check.name:<15} {check.found}")
            if check.mend:
                render.line(f"{'':<19} {check.mend}")
    ready = all(check.ok or not check.needed for check in found)
    if json:
        render.json_object({"ok": ready, "checks": found})
    if not ready:
        raise typer.Exit(1)
