"""Dimensions, ranges and sizes: which program serves which shape. Pure; imports neither torch nor sympy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import msgspec

from fxc.errors import InputError


class Range(msgspec.Struct, frozen=True, order=True):
    """A box of dimension values that one program serves. A *size* is a box with one point, or with one value of some
    dimensions.

    `bounds` holds (name, lowest, highest) per dimension, both ends included, in the order of the spec's `dims`.
    """

    bounds: tuple[tuple[str, int, int], ...]

    @property
    def is_size(self) -> bool:
        return all(low == high for _, low, high in self.bounds)

    @property
    def free(self) -> int:
        """How many dimensions may have several values."""
        return sum(low < high for _, low, high in self.bounds)

    @property
    def label(self) -> str:
        """`num_tokens=8`, `num_tokens=1..8192`, `batch=1..8,tokens=4`; `static` without dimensions."""
        parts = (f"{name}={low}" if low == high else f"{name}={low}..{high}" for name, low, high in self.bounds)
        return ",".join(parts) or "static"

    def contains(self, values: Mapping[str, int]) -> bool:
        return all(low <= values[name] <= high for name, low, high in self.bounds)

    def low(self) -> dict[str, int]:
        return {name: low for name, low, _ in self.bounds}

    def high(self) -> dict[str, int]:
        return {name: high for name, _, high in self.bounds}

    def replace(self, name: str, low: int, high: int) -> Range:
        """The same box with other bounds for dimension `name`."""
        return Range(tuple((n, low, high) if n == name else (n, lo, hi) for n, lo, hi in self.bounds))


_SIZE = re.compile(r"([^\W\d]\w*)(?:\s*([+-])\s*(\d+))?")


def parse_size(part: int | str) -> tuple[str, int]:
    """One size of an input as (dimension, number to add): `n` is ("n", 0), `n + 1` is ("n", 1), 8 is ("", 8).

    Raises:
        ValueError: no such expression.
    """
    if isinstance(part, int):
        return "", part
    match = _SIZE.fullmatch(part.strip())
    if match is None:
        raise ValueError(f"{part!r} is no size")
    return match[1], int(match[3] or 0) * (-1 if match[2] == "-" else 1)


def is_size(part: int | str) -> bool:
    """Whether `parse_size` reads it: a number, or a name, maybe with a number added."""
    return isinstance(part, int) or _SIZE.fullmatch(part.strip()) is not None


def size_at(part: int | str, values: Mapping[str, int]) -> int:
    """A size of an input, where the dimensions have these values."""
    name, more = parse_size(part)
    return values[name] + more if name else more


def dims_of(shape: Iterable[int | str]) -> Iterator[str]:
    """The dimensions that a shape mentions."""
    return (name for name, _ in map(parse_size, shape) if name)


def size_ranges(size: Mapping[str, int], ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The boxes of a size: those of the general program that hold it, with the dimensions that it names fixed.

    >>> [r.label for r in size_ranges({"n": 8}, general_ranges({"n": (1, 64), "r": (1, 9)}, [("r", 4)]))]
    ['n=8,r=1..4', 'n=8,r=5..9']
    """
    return tuple(
        Range(tuple((name, size.get(name, low), size.get(name, high)) for name, low, high in box.bounds))
        for box in ranges
        if all(low <= size.get(name, low) <= high for name, low, high in box.bounds)
    )


def point_label(point: Mapping[str, int]) -> str:
    """`batch=1,tokens=4`; `static` without dimensions."""
    return ",".join(f"{name}={value}" for name, value in point.items()) or "static"


def size_range(dims: Iterable[str], size: Mapping[str, int]) -> Range:
    """The box with the one point `size`."""
    return Range(tuple((name, size[name], size[name]) for name in dims))


def general_ranges(dims: Mapping[str, tuple[int, int]], boundaries: Iterable[tuple[str, int]]) -> tuple[Range, ...]:
    """The boxes of the general program: each dimension cut after every boundary, all combinations.

    >>> [r.label for r in general_ranges({"n": (1, 512)}, [("n", 256)])]
    ['n=1..256', 'n=257..512']
    """
    cuts: dict[str, list[int]] = {name: [] for name in dims}
    for name, value in boundaries:
        cuts[name].append(value)
    axes = []
    for name, (low, high) in dims.items():
        edges = sorted({value for value in cuts[name] if low <= value < high})
        starts = [low, *(value + 1 for value in edges)]
        axes.append([(name, start, stop) for start, stop in zip(starts, [*edges, high], strict=True)])
    return tuple(Range(box) for box in product(*axes))


def edge_points(box: Range, extra: Iterable[Mapping[str, int]] = ()) -> tuple[dict[str, int], ...]:
    """Where a program is checked in `box`: its corners, 1 and 2 in every dimension, and the `extra` points it holds."""
    axes = []
    for name, low, high in box.bounds:
        axes.append([(name, value) for value in sorted({low, high, *(v for v in (1, 2) if low <= v <= high)})])
    points = [dict(point) for point in product(*axes)]
    points += [dict(point) for point in extra if box.contains(point) and dict(point) not in points]
    return tuple(points)


def whole(ranges: Sequence[Range]) -> dict[str, tuple[int, int]]:
    """Lowest and highest value of each dimension over all ranges."""
    return {
        name: (min(box.bounds[axis][1] for box in ranges), max(box.bounds[axis][2] for box in ranges))
        for axis, (name, _, _) in enumerate(ranges[0].bounds)
    }


def select(ranges: Sequence[Range], values: Mapping[str, int]) -> int:
    """Index of the program that serves `values`: of those that hold it the first with the fewest free dimensions, which
    is the exact size where there is one.

    Raises:
        InputError: no range holds it.
    """
    found = [index for index, box in enumerate(ranges) if box.contains(values)]
    if not found:
        raise out_of_bounds(ranges, values)
    return min(found, key=lambda index: ranges[index].free)


def out_of_bounds(ranges: Sequence[Range], values: Mapping[str, int]) -> InputError:
    """The error for values that no range holds: names the dimension, the value and the bounds."""
    for name, value in values.items():
        lows = [low for box in ranges for n, low, _ in box.bounds if n == name]
        highs = [high for box in ranges for n, _, high in box.bounds if n == name]
        if lows and not min(lows) <= value <= max(highs):
            return InputError(
                f"{name} = {value} is out of bounds: the program was built for {min(lows)} to {max(highs)}",
                f"build with other bounds for dims.{name}",
            )
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    return InputError(f"no program serves {shown}", "build with ranges that cover it")


SMALL = 6
"""Of values up to this, where the bounds allow, `small_point` is made."""


def small_point(box: Range) -> dict[str, int]:
    """A point with small values, no two alike, for what does not depend on the size."""
    return {name: min(max(SMALL - index, start), stop) for index, (name, start, stop) in enumerate(box.bounds)}
