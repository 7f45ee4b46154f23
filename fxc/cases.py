"""Which graph is right for which shapes.

A trace follows one side of every branch on a size. Export tells of most of them (a range it narrows, a condition it
assumes), but it also takes for granted, silently, that no size is 0 or 1, and it keeps conditions that the graph does
not need. So neither is believed: where a promised size contradicts an assumption the model is traced again at that very
size, and the two graphs are compared, first as text, then by running both on the same random tensors. Where they differ
the range is split, and each part gets the graph that is right for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import fx

from fxc.errors import TraceError
from fxc.graph_text import print_graph, rename
from fxc.random_inputs import draw
from fxc.scalars import evaluate, is_scalar
from fxc.shapes import Range
from fxc.trace import Narrowed
from fxc.traced import Traced

Capture = Callable[[Range], Traced]

MAX_CASES = 8
"""More graphs than this for one model are a sign of a size-dependent loop, not of a branch."""
COMPARE_BYTES = 4 << 30
"""Graphs whose inputs and weights take more than this are compared as text only."""


def cover(box: Range, capture: Capture, sizes: Iterable[Mapping[str, int]]) -> list[Traced]:
    """Graphs that together are right for every shape in `box`; most models need one.

    Args:
        capture: traces the model for a range.
        sizes: points of special interest: the listed sizes and the ends of the ranges.

    Raises:
        TraceError: a branch that splits `box` into more than `MAX_CASES` parts, or in more than one dimension at once.
    """
    points = [dict(size) for size in sizes]
    done: list[Traced] = []
    waiting = [box]
    while waiting:
        if len(done) + len(waiting) > MAX_CASES:
            conditions = "; ".join(dict.fromkeys(c.text for traced in done for c in traced.conditions)) or "unknown"
            raise TraceError(
                f"the model takes another path for more than {MAX_CASES} ranges of sizes: {conditions}",
                "replace branches on sizes by tensor operations such as torch.where, or narrow the bounds in dims",
            )
        part = waiting.pop()
        try:
            traced = capture(part)
        except Narrowed as narrowed:
            waiting += _cut(part, narrowed.part, narrowed.message)
            continue
        odd = _first_difference(traced, capture, points)
        if odd is None:
            done.append(traced)
        else:
            waiting += _cut(part, odd[0], odd[1])
    return sorted(done, key=lambda traced: traced.range)


def _cut(whole: Range, part: Range, why: str) -> list[Range]:
    """`part`, and what is left of `whole` around it; they may differ in one dimension."""
    differing = [
        (name, low, high, (inner_low, inner_high))
        for (name, low, high), (_, inner_low, inner_high) in zip(whole.bounds, part.bounds, strict=True)
        if (low, high) != (inner_low, inner_high)
    ]
    if len(differing) != 1:
        raise TraceError(
            f"the model branches on {len(differing)} dimensions at once: {why}", "narrow the bounds in dims"
        )
    name, low, high, (inner_low, inner_high) = differing[0]
    pieces = [(low, inner_low - 1), (inner_low, inner_high), (inner_high + 1, high)]
    return [whole.replace(name, start, stop) for start, stop in pieces if start <= stop]


def _first_difference(
    traced: Traced, capture: Capture, points: Iterable[Mapping[str, int]]
) -> tuple[Range, str] | None:
    """A part of the range for which the graph is wrong, and why."""
    box = traced.range
    checked: set[Range] = set()
    for spot, why in _suspects(traced, points):
        if spot in checked:
            continue
        checked.add(spot)
        try:
            special = capture(spot)
        except Narrowed as narrowed:
            raise TraceError(f"no trace at {spot.label}: {narrowed.message}") from None
        if not same(traced, special):
            return spot, why
    del box
    return None


def _suspects(traced: Traced, points: Iterable[Mapping[str, int]]) -> Iterable[tuple[Range, str]]:
    """Parts of the range that contradict something the trace assumed: sizes 0 and 1, and broken conditions."""
    box = traced.range
    for name, low, high in box.bounds:
        for value in (0, 1):
            if low <= value <= high and low < high:
                yield box.replace(name, value, value), f"{name} = {value}"
    for condition in traced.conditions:
        for point in _interesting(box, points):
            try:
                holds = condition.holds(point)
            except (KeyError, ZeroDivisionError):
                continue
            if not holds:
                spot = Range(tuple((name, point[name], point[name]) for name, _, _ in box.bounds))
                yield spot, f"{condition.text} does not hold at {spot.label}"


def _interesting(box: Range, points: Iterable[Mapping[str, int]]) -> list[dict[str, int]]:
    """Every value of a single dimension (up to 16384), else corners, small values and the given points."""
    if len(box.bounds) == 1:
        ((name, low, high),) = box.bounds
        return [{name: value} for value in range(low, min(high, low + 16384) + 1)] + [{name: high}]
    axes = {
        name: sorted({low, low + 1, 2, 3, high - 1, high} & set(range(low, high + 1))) for name, low, high in box.bounds
    }
    grid: list[dict[str, int]] = [{}]
    for name, values in axes.items():
        grid = [{**point, name: value} for point in grid for value in values]
    return grid + [dict(point) for point in points if box.contains(point)]


def same(general: Traced, special: Traced) -> bool:
    """Whether two graphs compute the same at the shapes of `special`, whose range lies in that of `general`."""
    fixed = {name: low for name, low, high in special.range.bounds if low == high}
    left, right = _specialised(general, fixed), _specialised(special, fixed)
    if _text(left) == _text(right):
        return True
    point = {**general.range.low(), **{n: min(max(lo, 5), hi) for n, lo, hi in special.range.bounds}, **fixed}
    return _runs_equal(general, special, point)


def _text(graph: fx.Graph) -> str:
    rename(graph)
    lines = print_graph(graph, "f").splitlines()
    return "\n".join(line.split("  #")[0] for line in lines)


def _specialised(traced: Traced, sizes: Mapping[str, int]) -> fx.Graph:
    """A copy of the graph with size numbers that follow from `sizes` put in; placeholders by role, layouts dropped."""
    copy = fx.Graph()
    mapping: dict[fx.Node, object] = {}
    for node in traced.graph.nodes:
        if is_scalar(node):
            try:
                mapping[node] = evaluate(node, sizes)
                continue
            except (KeyError, TypeError):
                pass
        new = copy.node_copy(node, lambda n: mapping[n])  # type: ignore[arg-type,return-value]
        mapping[node] = new
        if node.op == "placeholder":
            new.meta = {"layout": f"{node.meta['role']}"}
            if not node.users:
                copy.erase_node(new)
    return copy


def _runs_equal(general: Traced, special: Traced, point: Mapping[str, int]) -> bool:
    """Run both graphs on the same random tensors at `point` and compare results and written inputs."""
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    total = 0
    for traced in (general, special):
        for node in traced.graph.nodes:
            if node.op != "placeholder" or node.meta["role"] in tensors or not node.users:
                continue
            role, name = node.meta["role"]
            if role == "constant":
                tensors[node.meta["role"]] = traced.constants[name].cpu()
                continue
            value = node.meta["val"]
            shape = [
                size if isinstance(size, int) else _size(size, node, index, point)
                for index, size in enumerate(value.shape)
            ]
            total += value.element_size() * int(torch.Size(shape).numel())
            if total > COMPARE_BYTES:
                raise TraceError(
                    f"the trace at {special.range.label} differs from the general one, and the model is too large to "
                    "compare them by running", "raise dims.*.min above it",
                )  # fmt: skip
            tensors[node.meta["role"]] = draw(shape, value.dtype, node.meta.get("values"), generator)
    try:
        results = [_run(traced, tensors) for traced in (general, special)]
    except Exception:
        return False  # the general graph does not even run there
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-4, equal_nan=True)
        for a, b in zip(*results, strict=True)
    )


def _size(size: torch.SymInt, node: fx.Node, index: int, point: Mapping[str, int]) -> int:
    layout = node.meta["layout"]
    text = layout[layout.index("[") + 1 : layout.index("]")].split(", ")[index]
    return int(eval(text, {"__builtins__": {}}, {**point, "Max": max, "Min": min}))


def _run(traced: Traced, tensors: Mapping[tuple[str, str], torch.Tensor]) -> list[torch.Tensor]:
    arguments = [
        tensors[node.meta["role"]].clone() if node.users else None
        for node in traced.graph.nodes
        if node.op == "placeholder"
    ]
    with torch.no_grad():
        outputs = fx.Interpreter(fx.GraphModule({}, traced.graph)).run(*arguments, enable_io_processing=False)
    flat = [value for value in outputs if isinstance(value, torch.Tensor)]
    return flat + [argument for argument in arguments if argument is not None]
