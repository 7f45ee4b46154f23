"""Times several ways to do one thing: in turns, so that what slows the machine down slows all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import torch

Call = Callable[[], object]

SAMPLE = 0.005
"""Seconds that one sample is meant to take."""
MOST_CALLS = 200
QUEUED = 5
"""Calls that a sample has at least on a GPU: the host's work for one hides behind the device's for another."""
WARMING = 3
"""Calls that are not counted, before the first sample."""
COPIED = 1 << 32
"""Bytes that are copied to measure a GPU's bandwidth, where there is room."""


class Timing(msgspec.Struct, frozen=True):
    """How long one call takes, in microseconds."""

    step_us: float
    """Median over the repeats. On a GPU it is waited for after several calls, and what they took is divided among
    them."""
    low_us: float
    """First quartile of it."""
    high_us: float
    """Third quartile of it."""
    host_us: float
    """Median until the call returns, on a GPU that had nothing to do before; the same as `step_us` on the CPU."""


class Samples(NamedTuple):
    """Seconds per call."""

    step: list[float]
    host: list[float]


def measure(calls: Mapping[str, Call], repeats: int, wait: Call | None) -> dict[str, Timing]:
    """Time the calls in turns, beginning with another one in each repeat.

    Args:
        wait: waits until the device is done; None where calls are done when they return.
    """
    counts = {name: _warmed(call, wait) for name, call in calls.items()}
    samples = {name: Samples([], []) for name in calls}
    names = list(calls)
    for repeat in range(repeats):
        first = repeat % max(len(names), 1)
        for name in [*names[first:], *names[:first]]:
            if wait is not None:
                samples[name].host.append(_seconds(calls[name], 1, wait, finish=False))
            samples[name].step.append(_seconds(calls[name], counts[name], wait))
    return {name: summary(*found) for name, found in samples.items()}


def summary(step: list[float], host: list[float]) -> Timing:
    """Medians and quartiles of seconds; without `host`, calls are done when they return."""
    low, middle, high = statistics.quantiles(step, n=4, method="inclusive") if len(step) > 1 else step * 3
    values = (middle, low, high, statistics.median(host or [middle]))
    return Timing(*(round(value * 1e6, 3) for value in values))


def _warmed(call: Call, wait: Call | None) -> int:
    """Call it a few times; how many calls a sample should have."""
    fastest = min(_seconds(call, 1, wait) for _ in range(WARMING))
    fill = math.ceil(SAMPLE / max(fastest, SAMPLE / MOST_CALLS))
    return max(fill, 1 if wait is None else QUEUED)


def _seconds(call: Call, count: int, wait: Call | None, *, finish: bool = True) -> float:
    """Seconds per call: until the device is done, or, unless `finish`, until the last one returns."""
    if wait is not None:
        wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    if finish and wait is not None:
        wait()
    return (time.perf_counter() - start) / count


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy on a GPU."""

    def wait() -> None:
        torch.cuda.synchronize(device)

    free, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(COPIED, free // 4), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [_seconds(partial(target.copy_, source), QUEUED, wait) for _ in range(6)]
    moved = 2 * source.nbytes
    del source, target
    torch.cuda.empty_cache()  # graphs take memory of their own
    return moved / statistics.median(times[1:])
