"""Time of work on a GPU, without that of the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def clock(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one call, in a graph of all of them, at least 16."""
    calls = list(calls) * max(1, -(-16 // len(calls)))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)) * 1e-3 / len(calls))
    return statistics.median(found)
