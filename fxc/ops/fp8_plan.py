"""How rows are shared out to programs: arithmetic without triton."""

from __future__ import annotations

from typing import NamedTuple

TILE = 2048
"""Elements that a program takes at least, several rows where they are narrow."""


class Tiles(NamedTuple):
    """How rows are shared out."""

    block: int
    """The width, up to a power of two."""
    rows: int
    """Of one program."""
    warps: int


def tiles(width: int) -> Tiles:
    """16 elements a thread, 32 in the widest rows."""
    block = max(16, 1 << (width - 1).bit_length())
    rows = max(1, TILE // block)
    return Tiles(block, rows, min(16, max(4, block * rows // 512)))
