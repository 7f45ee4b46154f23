"""What fusions take and what the same takes without them, as measured: `COSTS` decides at level 2 whether one is kept.

Lines are what `benchmarks/fusions.py` prints under "costs". A fusion that nothing was measured of is kept. At level 3
fusions are timed on the machine that builds, and the table is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import fx

from fxc.graph_text import parse_layout
from fxc.scalars import compute
from fxc.shapes import Range


class Cost(NamedTuple):
    """One measurement."""

    fusion: str
    """Name of the pass."""
    form: str
    """Where its scales come from, if it quantises: `static`, `per token`, `per block`."""
    compute_capability: tuple[int, int]
    rows: int
    width: int
    """Elements in a row of the first tensor that the fusion reads."""
    fused_us: float
    apart_us: float
    """Of what the compiler makes of the same graph without the fusion."""
    source: str
    """Where it comes from: a file in benchmarks/results."""


COSTS: tuple[Cost, ...] = ()
"""None yet: no result file holds a fusion beside the same graph without it."""


def of(compute_capability: tuple[int, int] | None) -> tuple[Cost, ...]:
    """What was measured on such a device."""
    return tuple(cost for cost in COSTS if cost.compute_capability == compute_capability)


def slower(costs: Iterable[Cost], fusion: str, made: Iterable[fx.Node], box: Range) -> str:
    """Why a fusion is not kept for the sizes in `box`; empty where it is.

    Args:
        made: nodes that it put in.
    """
    known = [cost for cost in costs if cost.fusion == fusion]
    found = [cost for node in made for cost in _near([c for c in known if c.form == _form(node)], *_rows(node, box))]
    if sum(math.log(cost.fused_us / cost.apart_us) for cost in found) <= 0:
        return ""
    worst = max(found, key=lambda cost: cost.fused_us / cost.apart_us)
    times = f"{worst.fused_us:g} µs as one kernel, {worst.apart_us:g} µs apart"
    return f"was measured slower: {times} at {worst.rows} rows of {worst.width} ({worst.source})"


def _form(node: Any) -> str:
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if "group" not in names:
        return ""
    if given["scale"] is not None:
        return "static"
    return "per block" if given.get("group") else "per token"


def _rows(node: Any, box: Range) -> tuple[int, int, int]:
    """The lowest and the highest number of rows of the first tensor that is read, and their width. Sizes that are
    numbers, a first one of 1 and the like excepted, are the width."""
    _, sizes, _ = parse_layout(node.all_input_nodes[0].meta["layout"])
    ends = ({name: bound[end] for name, *bound in box.bounds} for end in (0, 1))
    free = [size for size in sizes if not size.isdigit()]
    low, high = (math.prod(int(compute(size, point)) for size in free) for point in ends)
    return low, high, math.prod(int(size) for size in sizes if size.isdigit())


def _near(costs: list[Cost], low: int, high: int, width: int) -> list[Cost]:
    """Those of the nearest width, between `low` and `high`; where there are none, the nearest one."""
    if not costs:
        return []
    nearest = min((cost.width for cost in costs), key=lambda known: abs(math.log(known / width)))
    same = [cost for cost in costs if cost.width == nearest]
    inside = [cost for cost in same if low <= cost.rows <= high]
    middle = math.sqrt(max(low, 1) * max(high, 1))
    return inside or [min(same, key=lambda cost: abs(math.log(cost.rows / middle)))]
