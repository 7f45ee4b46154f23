"""Tuning records in the cache: one file per kind of device and version of torch, what is in it no matter here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fxc.cache.files import again, io_errors, make_dirs, sync_dir, write_file
from fxc.cache.layout import Layout
from fxc.cache.lock import lock, staging

LOCK = "tuning"


def read(layouts: Sequence[Layout], name: str) -> list[tuple[Path, bytes]]:
    """Path and text of the record of that name in each place that has one, in their order."""
    found = []
    for layout in layouts:
        path = layout.tuning / name
        with io_errors("read", path), suppress(FileNotFoundError, NotADirectoryError):
            found.append((path, again(path.read_bytes)))
    return found


def update(layout: Layout, name: str, change: Callable[[bytes | None], bytes | None]) -> None:
    """Replace a record by what `change` makes of it, under a lock, in one step; None leaves it as it is."""
    place = layout.tuning / name
    with staging(layout) as stage, lock(layout, LOCK):
        data = change(next((data for _, data in read((layout,), name)), None))
        if data is None:
            return
        with io_errors("write", place):
            make_dirs(layout.tuning)
            write_file(stage / name, data)
            os.rename(stage / name, place)
            sync_dir(layout.tuning)
