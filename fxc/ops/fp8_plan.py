"""How rows are shared out to programs: arithmetic without triton."""

from __future__ import annotations

from typing import NamedTuple

TILE = 2048
"""Elements that a program takes at least, several rows where they are narrow."""
PART = 1024
"""Elements of a program where rows can be taken apart."""


class Tiles(NamedTuple):
    """How rows are shared out."""

    block: int
    """Elements of a row that one program takes, a power of two."""
    rows: int
    """Of one program."""
    warps: int


def whole_rows(width: int) -> Tiles:
    """8 elements a thread, more in wide rows: with more, fewer threads are on a multiprocessor, which then waits."""
    block = _power(width)
    rows = max(1, TILE // block)
    return Tiles(block, rows, min(16, block * rows // 256))


def parts(width: int, group: int = 0) -> Tiles:
    """Parts of rows, of whole groups of elements, 8 a thread: one row keeps more than one multiprocessor busy."""
    block = min(_power(width), max(PART, group))
    rows = max(1, PART // block)
    return Tiles(block, rows, min(16, block * rows // 256))


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
