"""Lays a graph out as rows with lanes beside them, one lane for each value from where it is made to its last use. Pure.

As a history of commits is drawn: rows are in the order in which the ops run, so that equal graphs look equal. An input
stands where it is first read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fxc.cli.page.source import Graph, Op

PITCH = 13
"""Pixels between two lanes."""
WIDEST = 220
"""Pixels that all lanes may take; where there are many they move together."""


class Row(NamedTuple):
    op: Op
    kind: str
    """input, size, call, or output."""
    reads: tuple[int, ...]
    """Rows that make what it reads."""
    lane: int


class Drawing(NamedTuple):
    """Rows, and the lines between them. Rows are 1 high, lanes are in pixels."""

    rows: tuple[Row, ...]
    width: int
    lines: tuple[tuple[int, str], ...]
    """The row that makes a value, and the path of its line."""
    dots: tuple[float, ...]
    """Per row, pixels from the left."""


def draw(graph: Graph) -> Drawing:
    """The layout of a graph."""
    ops = [*_ordered(graph)]
    number = {op.name: index for index, (op, _) in enumerate(ops)}
    reads = [tuple(number[name] for name in op.reads if name in number) for op, _ in ops]
    last = dict(enumerate(range(len(ops))))
    for index, sources in enumerate(reads):
        last |= dict.fromkeys(sources, index)
    lanes = _lanes(last)
    pitch = min(PITCH, WIDEST / (max(lanes, default=0) + 1))
    dots = tuple(round((lane + 0.5) * pitch, 1) for lane in lanes)
    rows = tuple(Row(op, kind, reads[i], lanes[i]) for i, (op, kind) in enumerate(ops))
    lines = tuple((i, _line(dots, i, [j for j, row in enumerate(rows) if i in row.reads])) for i in range(len(rows)))
    width = round((max(lanes, default=0) + 1) * pitch)
    return Drawing(rows, width, tuple((i, path) for i, path in lines if path), dots)


def _ordered(graph: Graph) -> Iterator[tuple[Op, str]]:
    inputs = {op.name: op for op in graph.inputs}
    used = {name for op in graph.ops for name in op.reads} | {*graph.returns}
    yield from ((op, "input") for op in graph.inputs if op.name not in used)
    result = Op("return", "", ", ".join(graph.returns), "", graph.returns)
    for op in (*graph.ops, *([result] if graph.returns else [])):
        yield from ((inputs.pop(name), "input") for name in op.reads if name in inputs)
        yield op, "output" if op is result else "size" if op.is_size else "call"


def _lanes(last: dict[int, int]) -> list[int]:
    """The lane of each row's value, the leftmost that is free; what is read for the last time makes room in that row.

    Args:
        last: by row, the last one that reads its value.
    """
    lanes: list[int] = []
    taken: dict[int, int] = {}
    for index in range(len(last)):
        for lane, value in list(taken.items()):
            if last[value] <= index:
                del taken[lane]
        lane = next(lane for lane in range(len(taken) + 1) if lane not in taken)
        taken[lane] = index
        lanes.append(lane)
    return lanes


def _line(dots: tuple[float, ...], start: int, users: list[int]) -> str:
    """Down the value's lane, with a curve to each row that reads it."""
    if not users:
        return ""
    x = dots[start]
    end = users[-1] + (0.5 if dots[users[-1]] == x else -0.5)
    curves = (
        f"M{x} {user - 0.5}C{x} {user + 0.1} {dots[user]} {user - 0.1} {dots[user]} {user + 0.5}"
        for user in users
        if dots[user] != x
    )
    return f"M{x} {start + 0.5}V{end}" + "".join(curves)
