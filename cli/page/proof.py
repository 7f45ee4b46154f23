"""Where a build was compared with eager, and how far apart the two were. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fxc.manifest import Manifest

LEAST = 4
"""Powers of ten on the axis."""


class Point(NamedTuple):
    shape: str
    error: float
    tolerance: float
    excused: int
    at: float
    """Of the error on the axis, in percent."""


class Compared(NamedTuple):
    """A piece, or a whole step, at all points where it was compared with eager."""

    name: str
    is_piece: bool
    points: tuple[Point, ...]
    missing: tuple[tuple[str, str], ...]
    """Shape and reason."""
    accepted: float
    """Of the tolerance on the axis, in percent."""

    @property
    def worst(self) -> Point:
        return largest(self.points)


class Axis(NamedTuple):
    """Powers of ten that hold all errors and tolerances but zero."""

    low: int
    high: int

    def at(self, error: float) -> float:
        """In percent; zero is at the low end."""
        share = (math.log10(error) - self.low) / (self.high - self.low) if error > 0 else 0.0
        return round(100 * min(max(share, 0.0), 1.0), 2)


def largest(points: Iterable[Point]) -> Point:
    return max(points, key=lambda point: point.error)


def axis(manifest: Manifest) -> Axis:
    found = [value for entry in manifest.proof for value in (entry.max_rel_err, entry.tolerance) if value > 0]
    low, high = math.floor(math.log10(min(found, default=1e-8))), math.ceil(math.log10(max(found, default=1.0)))
    return Axis(min(low, high - LEAST), high)


def compared(manifest: Manifest, names: Mapping[str, str], axis: Axis) -> tuple[Compared, ...]:
    """Steps, then pieces.

    Args:
        names: of the pieces, by digest.
    """
    found = dict.fromkeys([entry.piece for entry in manifest.proof] + [entry.piece for entry in manifest.unproved])
    order = [*(name for name in found if name not in names), *(digest for digest in names if digest in found)]
    return tuple(_one(manifest, name, names, axis) for name in order)


def _one(manifest: Manifest, key: str, names: Mapping[str, str], axis: Axis) -> Compared:
    entries = [entry for entry in manifest.proof if entry.piece == key]
    points = tuple(
        Point(entry.shape, entry.max_rel_err, entry.tolerance, entry.excused, axis.at(entry.max_rel_err))
        for entry in entries
    )
    missing = tuple((entry.shape, entry.reason) for entry in manifest.unproved if entry.piece == key)
    accepted = axis.at(max((entry.tolerance for entry in entries), default=0.0))
    return Compared(names.get(key, key), key in names, points, missing, accepted)
