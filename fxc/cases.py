"""Which graph is right for which shapes.

A trace follows one side of every branch on a size. Export tells of most of them (a range it narrows, a condition it
assumes), but it also takes for granted, silently, that no size is 0 or 1, and it keeps conditions that the graph does
not need. So neither is believed: where a promised size contradicts an assumption the model is traced again at that very
size, and the two graphs are compared, first as text, then by running both on the same random tensors. Where they differ
the range is split, and each part gets the graph that is right for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch import fx

from fxc import graph_run
from fxc.errors import TraceError
from fxc.graph_text import print_graph, rename
from fxc.prove import accepted, largest_error, tolerance
from fxc.scalars import WORD, evaluate, is_scalar
from fxc.shapes import Range
from fxc.trace import Narrowed
from fxc.traced import Condition, Traced

Capture = Callable[[Range], Traced]

MAX_CASES = 8
"""More graphs than this for one model are a sign of a size-dependent loop, not of a branch."""
ALL_POINTS = 1 << 22
"""Points of a box that a condition is computed for, all at once."""
SOME_POINTS = 1 << 14
"""And one by one, where that cannot be done: 0.1 s."""
COMPARE_BYTES = 4 << 30
"""Graphs whose inputs and weights take more than this are compared as text only: a difference counts as one."""


def cover(box: Range, capture: Capture, sizes: Iterable[Mapping[str, int]]) -> list[Traced]:
    """Graphs that together are right for every shape in `box`; most models need one.

    Args:
        capture: traces the model for a range.
        sizes: points of special interest: the listed sizes and the ends of the ranges.

    Raises:
        TraceError: branches that split `box` into more than `MAX_CASES` parts.
    """
    points = [dict(size) for size in sizes]
    done: list[Traced] = []
    waiting = [box]
    reasons: dict[str, None] = {}
    while waiting:
        if len(done) + len(waiting) > MAX_CASES:
            raise TraceError(
                f"the model takes another path for more than {MAX_CASES} ranges of sizes: {next(iter(reasons))}",
                "replace branches on sizes by tensor operations such as torch.where, or narrow the bounds in dims",
            )
        part = waiting.pop()
        try:
            traced = capture(part)
        except Narrowed as narrowed:
            reasons[narrowed.message] = None
            waiting += _cut(part, narrowed.part)
            continue
        except TraceError as error:
            if not reasons:
                raise
            raise TraceError(
                f"{error.message} (the model takes another path at {part.label}: {next(iter(reasons))})", error.hint
            ) from error
        odd = _first_difference(traced, capture, points)
        if odd is None:
            done.append(traced)
        else:
            reasons[odd[1]] = None
            waiting += _cut(part, odd[0])
    return sorted(done, key=lambda traced: traced.range)


def _cut(whole: Range, part: Range) -> list[Range]:
    """`part`, and boxes that fill the rest of `whole` around it."""
    boxes = []
    for (name, low, high), (_, inner_low, inner_high) in zip(whole.bounds, part.bounds, strict=True):
        boxes += [whole.replace(name, a, b) for a, b in ((low, inner_low - 1), (inner_high + 1, high)) if a <= b]
        whole = whole.replace(name, inner_low, inner_high)
    return [*boxes, whole]


def _first_difference(
    traced: Traced, capture: Capture, points: Iterable[Mapping[str, int]]
) -> tuple[Range, str] | None:
    """A part of the range for which the graph is wrong, and why."""
    checked: set[Range] = set()
    for spot, why in _suspects(traced, points):
        if spot in checked:
            continue
        checked.add(spot)
        try:
            special = capture(spot)
        except Narrowed as narrowed:
            raise TraceError(f"no trace at {spot.label}: {narrowed.message}") from None
        except TraceError as error:
            raise TraceError(f"at {spot.label}: {error.message}", error.hint) from error
        if not same(traced, special):
            return spot, why
    return None


def _suspects(traced: Traced, points: Iterable[Mapping[str, int]]) -> Iterable[tuple[Range, str]]:
    """Parts of the range that contradict something the trace assumed: sizes 0 and 1, and broken conditions."""
    box = traced.range
    axes = [
        [(name, low, high), *((name, value, value) for value in (0, 1) if low <= value <= high and low < high)]
        for name, low, high in box.bounds
    ]
    for bounds in product(*axes):
        if bounds != box.bounds:
            spot = Range(bounds)
            broken = (condition.text for condition in traced.conditions if not _holds(condition, spot.low()))
            yield spot, next(broken, f"the graph at {spot.label} is another one")
    for condition in traced.conditions:
        for point in _broken(condition, box, points):
            named = set(WORD.findall(condition.text))
            spot = Range(tuple((n, point[n], point[n]) if n in named else (n, lo, hi) for n, lo, hi in box.bounds))
            yield spot, f"{condition.text} does not hold at {spot.label}"


def _holds(condition: Condition, point: Mapping[str, int]) -> bool:
    """Whether a condition holds; one that depends on data is not about sizes."""
    try:
        return bool(condition.holds(point))
    except (KeyError, ZeroDivisionError):
        return True


def _broken(condition: Condition, box: Range, points: Iterable[Mapping[str, int]]) -> list[dict[str, int]]:
    """Points of `box` where a condition does not hold: its first and last one of all, where it can be computed for all
    at once, else among values at the edges, next to numbers in its text, and the given points."""
    dims = [name for name, _, _ in box.bounds]
    used = [bound for bound in box.bounds if bound[0] in set(WORD.findall(condition.text))]
    if math.prod(high - low + 1 for _, low, high in used) <= ALL_POINTS:
        grids = np.meshgrid(*(np.arange(low, high + 1) for _, low, high in used), indexing="ij", sparse=True)
        try:
            held = condition.holds({**_OF_ARRAYS, **dict(zip((name for name, _, _ in used), grids, strict=True))})
            held = np.broadcast_to(np.asarray(held, dtype=bool), [high - low + 1 for _, low, high in used])
        except Exception:  # not in numpy's words, or about data
            pass
        else:
            places = np.argwhere(~held)
            ends = places[[0, -1]] if len(places) > 1 else places
            return [
                box.low() | {name: low + int(at) for (name, low, _), at in zip(used, end, strict=True)} for end in ends
            ]
    numbers = {int(text) + more for text in re.findall(r"\d+", condition.text) for more in (-1, 0, 1)}
    axes = [sorted(_edges(low, high) | {n for n in numbers if low <= n <= high}) for _, low, high in box.bounds]
    grid = [dict(zip(dims, values, strict=True)) for values in islice(product(*axes), SOME_POINTS)]
    return [p for p in (*grid, *(dict(p) for p in points if box.contains(p))) if not _holds(condition, p)]


_OF_ARRAYS: dict[str, Any] = {
    "abs": np.abs,
    "max": lambda *values: reduce(np.maximum, values),
    "min": lambda *values: reduce(np.minimum, values),
}
"""What `scalars.NAMES` offers for numbers, for arrays of them."""


def _edges(low: int, high: int) -> set[int]:
    return {*range(low, min(high, low + 16) + 1), *range(max(low, high - 16), high + 1)}


def same(general: Traced, special: Traced) -> bool:
    """Whether two graphs compute the same at the shapes of `special`, whose range lies in that of `general`."""
    fixed = {name: low for name, low, high in special.range.bounds if low == high}
    if _structure(general, fixed) != _structure(special, fixed):
        return False
    point = {**general.range.low(), **{n: min(max(lo, 5), hi) for n, lo, hi in special.range.bounds}, **fixed}
    if _text(general, fixed, point) == _text(special, fixed, point):
        return True
    return _runs_equal(general, special, point)


def _structure(traced: Traced, sizes: Mapping[str, int]) -> str:
    """What the output is made of; numbers by value where they follow from `sizes`."""

    def written(leaf: fx.Node) -> Any:
        if not is_scalar(leaf):
            return "tensor"
        try:
            return evaluate(leaf, sizes)
        except KeyError:
            return "number"

    return repr(fx.node.map_arg(traced.output, written))


def _text(traced: Traced, sizes: Mapping[str, int], point: Mapping[str, int]) -> str:
    """The graph with size numbers that follow from `sizes` put in, inputs by role, and the shapes at `point`."""
    copy = fx.Graph()
    mapping: dict[fx.Node, object] = {}
    for node in traced.graph.nodes:
        if is_scalar(node):
            try:
                mapping[node] = evaluate(node, sizes)
                continue
            except KeyError:
                pass
        new = copy.node_copy(node, lambda n: mapping[n])  # type: ignore[arg-type,return-value]
        mapping[node] = new
        new.meta = {"layout": str(graph_run.shape_at(node, point))}
        if node.op == "placeholder":
            new.meta["layout"] += str(node.meta["role"])
            if not node.users:
                copy.erase_node(new)
    rename(copy)
    return print_graph(copy, "f")


def _runs_equal(general: Traced, special: Traced, point: Mapping[str, int]) -> bool:
    """Run both graphs on the same random tensors at `point` and compare results and written inputs."""
    tensors = graph_run.arguments((general, special), point, "cpu", COMPARE_BYTES)
    if tensors is None:
        return False
    try:
        (results, written), (other_results, other_written) = (
            graph_run.run(traced, tensors, point, "cpu") for traced in (general, special)
        )
    except Exception:
        return False  # the general graph does not even run there, or has other shapes
    pairs = list(zip(results, other_results, strict=True))
    pairs += [(written.get(role, given), other_written.get(role, given)) for role, given in tensors.items()]
    limit = tolerance(print_graph(general.graph, "f"))
    return all(_close(a, b, limit) for a, b in pairs)


def _close(a: torch.Tensor, b: torch.Tensor, limit: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return largest_error(a, b) <= accepted(a.dtype, limit)
