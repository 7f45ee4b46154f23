"""Tuning records in the cache: one file per kind of device and version of torch, what is in it no matter here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from fxc.cache.files import again, io_errors, make_dirs, sync_dir, write_file
from fxc.cache.layout import Layout
from fxc.cache.lock import lock, staging

LOCK = "tuning"


def read(layouts: Sequence[Layout], name: str) -> bytes | None:
    """The record of that name in the first place that has one."""
    for layout in layouts:
        path = layout.tuning / name
        with io_errors("read", path):
            try:
                return again(path.read_bytes)
            except (FileNotFoundError, NotADirectoryError):
                continue
    return None


def update(layout: Layout, bases: Sequence[Layout], name: str, change: Callable[[bytes | None], bytes]) -> None:
    """Replace a record in `layout` by what `change` makes of it, under a lock, in one step."""
    place = layout.tuning / name
    with staging(layout) as stage, lock(layout, LOCK):
        data = change(read((layout, *bases), name))
        with io_errors("write", place):
            make_dirs(layout.tuning)
            write_file(stage / name, data)
            os.rename(stage / name, place)
            sync_dir(layout.tuning)
