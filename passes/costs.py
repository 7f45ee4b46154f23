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
    Cost("norm_quant", "static", (9, 0), 1, 4096, 1.57, 2.04, H200),
    Cost("norm_quant", "static", (9, 0), 8, 4096, 2.27, 2.41, H200),
    Cost("norm_quant", "static", (9, 0), 64, 4096, 2.64, 3.55, H200),
    Cost("norm_quant", "static", (9, 0), 256, 4096, 4.11, 4.37, H200),
    Cost("norm_quant", "static", (9, 0), 2048, 4096, 17.07, 18.15, H200),
    Cost("norm_quant", "static", (9, 0), 8192, 4096, 57.87, 61.89, H200),
    Cost("norm_quant", "per token", (9, 0), 1, 4096, 1.71, 2.43, H200),
    Cost("norm_quant", "per token", (9, 0), 8, 4096, 2.21, 2.88, H200),
    Cost("norm_quant", "per token", (9, 0), 64, 4096, 2.64, 3.41, H200),
    Cost("norm_quant", "per token", (9, 0), 256, 4096, 4.03, 5.40, H200),
    Cost("norm_quant", "per token", (9, 0), 2048, 4096, 16.37, 20.47, H200),
    Cost("norm_quant", "per token", (9, 0), 8192, 4096, 56.96, 73.24, H200),
    Cost("gated_quant", "static", (9, 0), 1, 4096, 1.21, 1.15, H200),
    Cost("gated_quant", "static", (9, 0), 8, 4096, 1.68, 1.70, H200),
    Cost("gated_quant", "static", (9, 0), 64, 4096, 2.23, 2.15, H200),
    Cost("gated_quant", "static", (9, 0), 256, 4096, 3.28, 3.76, H200),
    Cost("gated_quant", "static", (9, 0), 2048, 4096, 12.24, 14.64, H200),
    Cost("gated_quant", "static", (9, 0), 8192, 4096, 41.43, 50.24, H200),
    Cost("gated_quant", "per token", (9, 0), 1, 4096, 1.74, 2.76, H200),
    Cost("gated_quant", "per token", (9, 0), 8, 4096, 2.02, 2.82, H200),
    Cost("gated_quant", "per token", (9, 0), 64, 4096, 2.52, 3.81, H200),
    Cost("gated_quant", "per token", (9, 0), 256, 4096, 3.62, 5.22, H200),
    Cost("gated_quant", "per token", (9, 0), 2048, 4096, 12.38, 28.00, H200),
    Cost("gated_quant", "per token", (9, 0), 8192, 4096, 41.79, 99.78, H200),
    Cost("norm_rope", "", (9, 0), 1, 4096, 1.28, 3.11, H200),
    Cost("norm_rope", "", (9, 0), 8, 4096, 1.82, 3.84, H200),
    Cost("norm_rope", "", (9, 0), 64, 4096, 2.33, 5.73, H200),
    Cost("norm_rope", "", (9, 0), 256, 4096, 3.29, 9.52, H200),
    Cost("norm_rope", "", (9, 0), 2048, 4096, 12.48, 28.60, H200),
    Cost("norm_rope", "", (9, 0), 8192, 4096, 43.03, 102.90, H200),
    Cost("rope_write", "", (9, 0), 1, 4096, 1.32, 5.86, H200),
    Cost("rope_write", "", (9, 0), 8, 4096, 1.97, 9.02, H200),
    Cost("rope_write", "", (9, 0), 64, 4096, 2.36, 10.46, H200),
    Cost("rope_write", "", (9, 0), 256, 4096, 3.74, 12.23, H200),
    Cost("rope_write", "", (9, 0), 2048, 4096, 15.14, 32.09, H200),
    Cost("rope_write", "", (9, 0), 8192, 4096, 52.57, 98.34, H200),
    Cost("norm_quant", "static", (9, 0), 1, 8192, 2.42, 2.84, H200),
    Cost("norm_quant", "static", (9, 0), 8, 8192, 3.03, 3.46, H200),
    Cost("norm_quant", "static", (9, 0), 64, 8192, 3.54, 5.50, H200),
    Cost("norm_quant", "static", (9, 0), 256, 8192, 6.25, 7.94, H200),
    Cost("norm_quant", "static", (9, 0), 2048, 8192, 32.46, 34.44, H200),
    Cost("norm_quant", "static", (9, 0), 8192, 8192, 113.74, 124.12, H200),
    Cost("norm_quant", "per token", (9, 0), 1, 8192, 2.61, 3.44, H200),
    Cost("norm_quant", "per token", (9, 0), 8, 8192, 3.13, 4.19, H200),
    Cost("norm_quant", "per token", (9, 0), 64, 8192, 3.76, 6.05, H200),
    Cost("norm_quant", "per token", (9, 0), 256, 8192, 6.47, 9.42, H200),
    Cost("norm_quant", "per token", (9, 0), 2048, 8192, 31.12, 39.86, H200),
    Cost("norm_quant", "per token", (9, 0), 8192, 8192, 112.86, 132.93, H200),
    Cost("gated_quant", "static", (9, 0), 1, 8192, 1.24, 1.18, H200),
    Cost("gated_quant", "static", (9, 0), 8, 8192, 1.93, 1.92, H200),
    Cost("gated_quant", "static", (9, 0), 64, 8192, 2.56, 2.50, H200),
    Cost("gated_quant", "static", (9, 0), 256, 8192, 4.59, 5.16, H200),
    Cost("gated_quant", "static", (9, 0), 2048, 8192, 21.90, 26.49, H200),
    Cost("gated_quant", "static", (9, 0), 8192, 8192, 80.68, 97.62, H200),
    Cost("gated_quant", "per token", (9, 0), 1, 8192, 2.25, 3.67, H200),
    Cost("gated_quant", "per token", (9, 0), 8, 8192, 2.73, 4.28, H200),
    Cost("gated_quant", "per token", (9, 0), 64, 8192, 3.16, 5.83, H200),
    Cost("gated_quant", "per token", (9, 0), 256, 8192, 5.26, 8.14, H200),
    Cost("gated_quant", "per token", (9, 0), 2048, 8192, 22.78, 43.74, H200),
    Cost("gated_quant", "per token", (9, 0), 8192, 8192, 79.04, 157.16, H200),
    Cost("norm_rope", "", (9, 0), 1, 8192, 1.31, 2.90, H200),
    Cost("norm_rope", "", (9, 0), 8, 8192, 2.03, 4.16, H200),
    Cost("norm_rope", "", (9, 0), 64, 8192, 2.55, 5.59, H200),
    Cost("norm_rope", "", (9, 0), 256, 8192, 4.40, 9.82, H200),
    Cost("norm_rope", "", (9, 0), 2048, 8192, 20.40, 48.24, H200),
    Cost("norm_rope", "", (9, 0), 8192, 8192, 75.04, 181.47, H200),
    Cost("rope_write", "", (9, 0), 1, 8192, 1.30, 5.89, H200),
    Cost("rope_write", "", (9, 0), 8, 8192, 2.00, 9.23, H200),
    Cost("rope_write", "", (9, 0), 64, 8192, 2.61, 10.58, H200),
    Cost("rope_write", "", (9, 0), 256, 8192, 4.70, 15.41, H200),
    Cost("rope_write", "", (9, 0), 2048, 8192, 22.73, 43.29, H200),
    Cost("rope_write", "", (9, 0), 8192, 8192, 83.83, 143.35, H200),
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
