"""A benchmark as a picture: latency and tokens per second against size, on log axes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

from fxc.shapes import point_label
from fxc.spec import REQUESTS

if TYPE_CHECKING:
    from fxc.bench import BenchResult, Measured

COLORS = {
    "eager": "#6b7280", "compiled": "#2563eb", "piecewise": "#0d9488", "full": "#16a34a",
    "torch.compile": "#ea580c", "reduce-overhead": "#b91c1c", "roofline": "#111827",
}  # fmt: skip
ROOFLINE = "roofline"
WIDTH, HEIGHT = 460, 340
"""Of a panel, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
"""Margins of a panel: labels of the axes lie in them."""
LEGEND = 28
MOST_TICKS = 8
FONT = "font-family='system-ui, sans-serif' font-size='12'"

Points = list[tuple[float, float]]
Value = Callable[[int, float], float]
"""Of the rows of a size and the seconds that it takes."""


class Axis(NamedTuple):
    """A log axis: values `low` to `high` lie at pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return round(self.start + share * (self.end - self.start), 1)


def svg(result: BenchResult) -> str:
    """The picture."""
    latency = lines(result, lambda _, seconds: seconds * 1e6)
    rate = lines(result, lambda rows, seconds: rows / seconds)
    title = f"{result.model}, {result.device}, torch {result.torch.partition('+')[0]}"
    title += "" if result.context is None else f", context {result.context}"
    width, height = 2 * WIDTH, LEGEND + HEIGHT
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='{LEFT}' y='18' font-weight='bold'>{escape(title)}</text>",
        *_legend(list(latency)),
        *_panel(0, "latency, µs", latency, result.sizes),
        *_panel(WIDTH, "tokens per second", rate, result.sizes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def lines(result: BenchResult, value: Value) -> dict[str, Points]:
    """By name, the points (rows of a size, value) of each variant that was timed, and of the roofline."""
    found: dict[str, Points] = {}
    for name in result.variants:
        times = [(size.tokens, size.times[name].step_us) for size in result.sizes if name in size.times]
        found[name] = [(rows, value(rows, taken / 1e6)) for rows, taken in times]
    bounds = [(size.tokens, size.roofline_us) for size in result.sizes]
    found[ROOFLINE] = [(rows, value(rows, taken / 1e6)) for rows, taken in bounds if taken]
    return {name: points for name, points in found.items() if points}


def ticks(low: float, high: float) -> list[float]:
    """Values 1, 2 and 5 times a power of ten that enclose both; where these are many, the powers alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**power for power in range(first, max(last, first + 1) + 1)]
    fine = [factor * power for power in powers for factor in (1, 2, 5)]
    below = [mark for mark in fine if mark <= low]
    above = [mark for mark in fine if mark >= high and mark > below[-1]]
    marks = fine[len(below) - 1 : fine.index(above[0]) + 1]
    return marks if len(marks) <= MOST_TICKS else powers


def shown(value: float) -> str:
    """`0.1`, `100`, `10k`, `1M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * 0.999:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = float(LEFT)
    for name in names:
        yield f"<path d='M{x} {LEGEND + 6}h18' {_stroke(name)}/>"
        yield f"<text x='{x + 24}' y='{LEGEND + 10}'>{escape(name)}</text>"
        x += 24 + 7 * len(name) + 24


def _panel(offset: int, title: str, curves: dict[str, Points], sizes: Sequence[Measured]) -> Iterator[str]:
    rows = sorted({size.tokens for size in sizes})
    values = [value for points in curves.values() for _, value in points]
    marks = ticks(min(values), max(values))
    across = Axis(rows[0] / 1.15, rows[-1] * 1.15, offset + LEFT, offset + WIDTH - RIGHT)
    up = Axis(marks[0], marks[-1], LEGEND + HEIGHT - BOTTOM, LEGEND + TOP)
    yield f"<text x='{across.start}' y='{up.end - 8}'>{escape(title)}</text>"
    for mark in marks:
        y = up.at(mark)
        yield f"<path d='M{across.start} {y}H{across.end}' stroke='#e5e7eb'/>"
        yield f"<text x='{across.start - 6}' y='{y + 4}' text-anchor='end'>{shown(mark)}</text>"
    last = -math.inf
    for row in rows:
        x = across.at(row)
        yield f"<path d='M{x} {up.start}v4' stroke='#9ca3af'/>"
        if x - last > 8 + 7 * len(str(row)):  # labels do not overlap
            yield f"<text x='{x}' y='{up.start + 18}' text-anchor='middle'>{row}</text>"
            last = x
    middle = (across.start + across.end) / 2
    yield f"<text x='{middle}' y='{up.start + 36}' text-anchor='middle'>{escape(_meaning(sizes[0]))}</text>"
    for name, points in curves.items():
        yield from _curve(name, [(across.at(x), up.at(y)) for x, y in points])


def _curve(name: str, points: Points) -> Iterator[str]:
    path = " ".join(f"{x},{y}" for x, y in points)
    yield f"<polyline points='{path}' fill='none' {_stroke(name)}/>"
    if name != ROOFLINE or len(points) == 1:
        yield from (f"<circle cx='{x}' cy='{y}' r='2.5' fill='{COLORS[name]}'/>" for x, y in points)


def _stroke(name: str) -> str:
    dashes = " stroke-dasharray='5 4'" if name == ROOFLINE else ""
    return f"stroke='{COLORS[name]}' stroke-width='1.6'{dashes}"


def _meaning(size: Measured) -> str:
    """What the numbers along the axis are."""
    names = list(size.size)
    if not names:
        return point_label({})
    return "requests that decode one token each" if REQUESTS in names else " × ".join(names)
