"""`fxc prune`: remove what is not needed any more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer

from fxc import machine
from fxc.cache import Cache, Pruned, Rules
from fxc.cli import amounts, render
from fxc.cli.options import CacheDir, Json, Quiet, Verbose
from fxc.errors import IncompatibleError
from fxc.manifest import Manifest
from fxc.target import Target


def run(
    keep_latest: Annotated[
        int | None,
        typer.Option("--keep-latest", metavar="N", min=0, help="Keep the N used last; alone: remove all others."),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="7d", help="Remove what was not used for so long.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="20G", help="Remove the least recently used until it takes that much."),
    ] = None,
    incompatible: Annotated[
        bool, typer.Option("--incompatible", help="Remove what does not fit this machine, or cannot be read.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Remove artifacts, least recently used first, and what nothing refers to; never what is in use."""
    rules = Rules(
        keep_latest=keep_latest,
        older_than=None if older_than is None else amounts.seconds(older_than, "--older-than"),
        max_bytes=None if max_bytes is None else amounts.number_of_bytes(max_bytes, "--max-bytes"),
        unfit=_unfit() if incompatible else None,
    )
    pruned = Cache.open(cache_dir).prune(rules, dry_run=dry_run)
    if not quiet:
        _say(pruned)
    if json:
        render.json_object(pruned)


def _unfit() -> Callable[[Manifest], bool]:
    """Whether an artifact does not run here. Where there is no such device, none for it does."""
    known: dict[str, Target | None] = {}

    def unfit(manifest: Manifest) -> bool:
        device = manifest.target.device
        if device not in known:
            try:
                known[device] = machine.here(device)
            except IncompatibleError:
                known[device] = None
        here = known[device]
        if here is None:
            return True
        verdicts = machine.fits(manifest.target, here, machine.needs_of(manifest), machine.libraries())
        return not all(verdict.accepted for verdict in verdicts)

    return unfit


def _say(pruned: Pruned) -> None:
    verb, now = "would remove" if pruned.dry_run else "removed", time.time()
    for removal in pruned.removed:
        used = f"last used {render.ago(now - removal.last_used)} ago"
        render.line(f"{verb} {removal.hash}  {render.size_bytes(removal.bytes)}, {used} (--{removal.reason})")
    for hash in pruned.in_use:
        render.line(f"kept {hash}  in use")
    if pruned.binaries:
        render.line(f"{verb} {render.count(pruned.binaries, 'binary')} that no artifact refers to")
    if pruned.building:
        render.line("kept all binaries: a build is running")
    if pruned.staging:
        render.line(f"{verb} what killed processes left in staging: {render.count(pruned.staging, 'folder')}")
    freed = render.size_bytes(sum(removal.bytes for removal in pruned.removed))
    what = render.count(len(pruned.removed), "artifact")
    stay = render.size_bytes(pruned.bytes)
    render.line(
        f"{what} to remove, {freed}; {stay} would stay" if pruned.dry_run else f"{what} removed, {freed}; {stay} left"
    )
