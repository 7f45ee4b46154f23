"""`fxc doctor`: what a build and a load need on this machine."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from fxc import records
from fxc.cli import checks, render, target_checks
from fxc.cli.options import CacheDir, Json, Quiet, Verbose


def run(
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="NAME|FILE", help="Also what a build for this GPU needs, which is not here."),
    ] = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check what a build and a load need on this machine; exit 1 if something needed is not there."""
    more = target_checks.every(records.find(target)) if target is not None else ()
    found: list[checks.Check] = []
    for check in chain(checks.every(cache_dir), more):
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
