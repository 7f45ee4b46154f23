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


H200 = "benchmarks/results/h200-fusions.json"
COSTS: tuple[Cost, ...] = (
    Cost("norm_quant", "static", (9, 0), 1, 4096, 1.60, 2.18, H200),
    Cost("norm_quant", "static", (9, 0), 8, 4096, 2.04, 2.29, H200),
    Cost("norm_quant", "static", (9, 0), 64, 4096, 2.47, 3.18, H200),
    Cost("norm_quant", "static", (9, 0), 256, 4096, 3.87, 3.87, H200),
    Cost("norm_quant", "static", (9, 0), 2048, 4096, 15.95, 15.74, H200),
    Cost("norm_quant", "static", (9, 0), 8192, 4096, 57.76, 62.29, H200),
    Cost("norm_quant", "per token", (9, 0), 1, 4096, 1.96, 2.60, H200),
    Cost("norm_quant", "per token", (9, 0), 8, 4096, 2.28, 3.21, H200),
    Cost("norm_quant", "per token", (9, 0), 64, 4096, 2.69, 3.50, H200),
    Cost("norm_quant", "per token", (9, 0), 256, 4096, 4.16, 4.84, H200),
    Cost("norm_quant", "per token", (9, 0), 2048, 4096, 17.21, 19.70, H200),
    Cost("norm_quant", "per token", (9, 0), 8192, 4096, 59.12, 73.36, H200),
    Cost("gated_quant", "static", (9, 0), 1, 4096, 1.29, 1.18, H200),
    Cost("gated_quant", "static", (9, 0), 8, 4096, 1.43, 1.35, H200),
    Cost("gated_quant", "static", (9, 0), 64, 4096, 2.13, 2.42, H200),
    Cost("gated_quant", "static", (9, 0), 256, 4096, 3.24, 3.77, H200),
    Cost("gated_quant", "static", (9, 0), 2048, 4096, 11.75, 14.39, H200),
    Cost("gated_quant", "static", (9, 0), 8192, 4096, 41.63, 50.35, H200),
    Cost("gated_quant", "per token", (9, 0), 1, 4096, 1.82, 2.77, H200),
    Cost("gated_quant", "per token", (9, 0), 8, 4096, 2.05, 2.79, H200),
    Cost("gated_quant", "per token", (9, 0), 64, 4096, 2.45, 3.18, H200),
    Cost("gated_quant", "per token", (9, 0), 256, 4096, 3.63, 5.14, H200),
    Cost("gated_quant", "per token", (9, 0), 2048, 4096, 13.64, 24.86, H200),
    Cost("gated_quant", "per token", (9, 0), 8192, 4096, 46.21, 100.84, H200),
    Cost("norm_rope", "", (9, 0), 1, 4096, 1.33, 2.90, H200),
    Cost("norm_rope", "", (9, 0), 8, 4096, 1.43, 3.37, H200),
    Cost("norm_rope", "", (9, 0), 64, 4096, 2.12, 5.67, H200),
    Cost("norm_rope", "", (9, 0), 256, 4096, 2.93, 9.49, H200),
    Cost("norm_rope", "", (9, 0), 2048, 4096, 12.73, 30.12, H200),
    Cost("norm_rope", "", (9, 0), 8192, 4096, 48.36, 102.97, H200),
    Cost("rope_write", "", (9, 0), 1, 4096, 2.47, 5.76, H200),
    Cost("rope_write", "", (9, 0), 8, 4096, 3.11, 7.97, H200),
    Cost("rope_write", "", (9, 0), 64, 4096, 4.24, 10.38, H200),
    Cost("rope_write", "", (9, 0), 256, 4096, 5.39, 11.92, H200),
    Cost("rope_write", "", (9, 0), 2048, 4096, 16.16, 32.96, H200),
    Cost("rope_write", "", (9, 0), 8192, 4096, 56.81, 104.81, H200),
    Cost("norm_quant", "static", (9, 0), 1, 8192, 2.42, 3.42, H200),
    Cost("norm_quant", "static", (9, 0), 8, 8192, 2.94, 3.24, H200),
    Cost("norm_quant", "static", (9, 0), 64, 8192, 3.27, 4.92, H200),
    Cost("norm_quant", "static", (9, 0), 256, 8192, 5.94, 6.95, H200),
    Cost("norm_quant", "static", (9, 0), 2048, 8192, 32.48, 34.61, H200),
    Cost("norm_quant", "static", (9, 0), 8192, 8192, 113.81, 125.26, H200),
    Cost("norm_quant", "per token", (9, 0), 1, 8192, 2.76, 3.73, H200),
    Cost("norm_quant", "per token", (9, 0), 8, 8192, 3.23, 3.98, H200),
    Cost("norm_quant", "per token", (9, 0), 64, 8192, 3.62, 4.39, H200),
    Cost("norm_quant", "per token", (9, 0), 256, 8192, 6.36, 8.40, H200),
    Cost("norm_quant", "per token", (9, 0), 2048, 8192, 33.48, 47.97, H200),
    Cost("norm_quant", "per token", (9, 0), 8192, 8192, 115.24, 132.65, H200),
    Cost("gated_quant", "static", (9, 0), 1, 8192, 1.32, 1.18, H200),
    Cost("gated_quant", "static", (9, 0), 8, 8192, 1.93, 1.86, H200),
    Cost("gated_quant", "static", (9, 0), 64, 8192, 2.47, 2.44, H200),
    Cost("gated_quant", "static", (9, 0), 256, 8192, 4.47, 5.17, H200),
    Cost("gated_quant", "static", (9, 0), 2048, 8192, 22.19, 26.62, H200),
    Cost("gated_quant", "static", (9, 0), 8192, 8192, 81.40, 98.54, H200),
    Cost("gated_quant", "per token", (9, 0), 1, 8192, 2.61, 4.29, H200),
    Cost("gated_quant", "per token", (9, 0), 8, 8192, 3.22, 5.52, H200),
    Cost("gated_quant", "per token", (9, 0), 64, 8192, 3.49, 5.72, H200),
    Cost("gated_quant", "per token", (9, 0), 256, 8192, 5.09, 8.02, H200),
    Cost("gated_quant", "per token", (9, 0), 2048, 8192, 24.53, 50.47, H200),
    Cost("gated_quant", "per token", (9, 0), 8192, 8192, 84.70, 157.44, H200),
    Cost("norm_rope", "", (9, 0), 1, 8192, 1.34, 3.14, H200),
    Cost("norm_rope", "", (9, 0), 8, 8192, 1.75, 4.12, H200),
    Cost("norm_rope", "", (9, 0), 64, 8192, 2.28, 6.27, H200),
    Cost("norm_rope", "", (9, 0), 256, 8192, 4.40, 9.56, H200),
    Cost("norm_rope", "", (9, 0), 2048, 8192, 21.76, 49.95, H200),
    Cost("norm_rope", "", (9, 0), 8192, 8192, 83.08, 181.52, H200),
    Cost("rope_write", "", (9, 0), 1, 8192, 2.46, 5.82, H200),
    Cost("rope_write", "", (9, 0), 8, 8192, 3.62, 8.93, H200),
    Cost("rope_write", "", (9, 0), 64, 8192, 4.33, 10.72, H200),
    Cost("rope_write", "", (9, 0), 256, 8192, 6.26, 13.25, H200),
    Cost("rope_write", "", (9, 0), 2048, 8192, 25.65, 44.00, H200),
    Cost("rope_write", "", (9, 0), 8192, 8192, 91.56, 135.87, H200),
)


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
