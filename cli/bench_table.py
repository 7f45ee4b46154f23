"""A benchmark in tables and words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fxc.cli import render
from fxc.shapes import point_label
from fxc.spec import REQUESTS

if TYPE_CHECKING:
    from fxc.bench import BenchResult, Measured
    from fxc.timing import Timing

NONE = "-"
Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


def show(result: BenchResult) -> None:
    """All of it."""
    render.line(f"\n{headline(result)}")
    header, rows = step_table(result)
    render.table("step, µs", header, rows, header[1:])
    if result.device != "cpu":  # there, a call returns when it is done
        header, rows = host_table(result)
        render.table("host, µs", header, rows, header[1:])
    if result.graphs:
        header, rows = graph_table(result)
        render.table("graphs", header, rows, header[1:])
    if text := list(notes(result)):
        render.line("\n" + "\n".join(text))


def headline(result: BenchResult) -> str:
    """`TinyLlama on cpu, torch 2.13.0, 2 threads: median of 20, 18.3 MB of weights`."""
    parts = [f"median of {result.repeats}", f"{render.size_bytes(result.weights)} of weights"]
    if result.context is not None:
        parts.append(f"context {result.context}, {render.size_bytes(result.cache)} of caches")
    if result.bandwidth is not None:
        parts.append(f"a copy moves {render.size_bytes(round(result.bandwidth))}/s")
    threads = f", {render.count(result.threads, 'thread')}" if result.device == "cpu" else ""
    release = result.torch.partition("+")[0]
    return f"{result.model} on {result.device}, torch {release}{threads}: {', '.join(parts)}"


def step_table(result: BenchResult) -> Table:
    """Steps of every variant, how much they vary, the padding, and the roofline where there is one."""
    graphs, roofline = bool(result.graphs), result.bandwidth is not None
    header = [_axis(result), *result.variants, "spread"] + ["padding"] * graphs + ["roofline"] * roofline
    rows = []
    for size in result.sizes:
        row = [_shown(size)]
        row += [micro(size.times[name].step_us) if name in size.times else NONE for name in result.variants]
        row.append(f"±{100 * spread(list(size.times.values())):.0f}%")
        row += [_padding(size)] * graphs
        row += [NONE if size.roofline_us is None else micro(size.roofline_us)] * roofline
        rows.append(row)
    return header, rows


def host_table(result: BenchResult) -> Table:
    """How long calls take to return."""
    rows = [
        [_shown(size)] + [micro(size.times[name].host_us) if name in size.times else NONE for name in result.variants]
        for size in result.sizes
    ]
    return [_axis(result), *result.variants], rows


def graph_table(result: BenchResult) -> Table:
    """What the CUDA graphs take."""
    rows = [
        [mode, str(len(graphs.sizes)), render.size_bytes(graphs.bytes), render.duration(graphs.seconds)]
        for mode, graphs in result.graphs.items()
    ]
    return ["mode", "sizes", "memory", "captured in"], rows


def notes(result: BenchResult) -> Iterator[str]:
    """Which programs serve the sizes, and why cells are empty: one line per reason."""
    for size in result.sizes:
        if not size.own:
            yield f"{_shown(size)}: no program of its own, served by {size.served_by}"
    reasons: dict[str, dict[str, list[str]]] = {}
    for size in result.sizes:
        for name, why in size.missing.items():
            reasons.setdefault(why, {}).setdefault(name, []).append(_shown(size))
    for why, names in reasons.items():
        places = next(iter(names.values()))
        where = "" if len(places) == len(result.sizes) else f" at {', '.join(places)}"
        yield f"{', '.join(names)}{where}: {why}"


def micro(value: float) -> str:
    """Microseconds with three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def spread(times: Sequence[Timing]) -> float:
    """Half the range between the quartiles over the median, where it is largest."""
    return max(((time.high_us - time.low_us) / 2 / time.step_us for time in times), default=0.0)


def _axis(result: BenchResult) -> str:
    """What the first column holds: the one dimension that calls choose, or sizes by name."""
    names = list(result.sizes[0].size)
    return "requests" if result.context is not None else names[0] if len(names) == 1 else "size"


def _shown(size: Measured) -> str:
    one = len(size.size) == 1 or size.size.get(REQUESTS) == size.tokens
    return str(size.tokens) if one else point_label(size.size)


def _padding(size: Measured) -> str:
    return "/".join(dict.fromkeys(str(rows) for rows in size.padding.values())) or NONE
