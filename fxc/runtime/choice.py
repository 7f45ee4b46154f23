"""Which captured graph serves a batch: a pure function of its sizes and of what is captured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from fxc.capture_plan import Mode
from fxc.shapes import point_label

TOKENS, REQUESTS = "num_tokens", "num_requests"
"""Dimensions of a program with `kv_cache`."""

MODES: tuple[Mode, ...] = ("full", "piecewise")
"""In order of preference; after them comes the compiled program without a graph."""


class BatchDescriptor(msgspec.Struct, frozen=True):
    """What dispatch looks at: the values of the dimensions of a call."""

    sizes: dict[str, int]

    @property
    def num_tokens(self) -> int:
        """Rows: the `num_tokens` of a program with `kv_cache`, else its first dimension; 1 where there is none."""
        return self.sizes.get(TOKENS, next(iter(self.sizes.values()), 1))

    @property
    def num_requests(self) -> int | None:
        """None where the program knows no requests."""
        return self.sizes.get(REQUESTS)

    @property
    def uniform_decode(self) -> bool:
        """No more new tokens than requests: one for each."""
        return self.num_requests is not None and self.num_tokens <= self.num_requests


class Captured(msgspec.Struct, frozen=True):
    """What there is to choose from."""

    sizes: dict[Mode, tuple[dict[str, int], ...]]
    """Full graphs fix all dimensions, piecewise ones those that their pieces depend on."""
    unpadded: dict[Mode, str] = {}
    """Why batches of a mode cannot be padded, where they cannot."""
    failures: dict[Mode, str] = {}
    """Why there are no graphs of a mode, where they were wished for."""


class Choice(msgspec.Struct, frozen=True):
    """How a batch is served. `str()` of it is one line."""

    mode: Literal["full", "piecewise", "compiled"]
    size: dict[str, int]
    """The captured size that is replayed; empty for `compiled`."""
    padding: int
    """Rows that are added."""
    why: str

    def __str__(self) -> str:
        return f"{self.mode}{' ' * bool(self.size)}{point_label(self.size) if self.size else ''}: {self.why}"


def choose(batch: BatchDescriptor, captured: Captured) -> Choice:
    """The full graph of the batch's sizes, or the least one that the batch can be padded to; else a piecewise graph
    likewise; else none. It never fails.

    A graph of one token for each request has kernels for just that, so that other batches are not padded to it.
    """
    reasons = []
    for mode in MODES:
        sizes = captured.sizes.get(mode, ())
        fitting = [size for size in sizes if all(value >= batch.sizes[name] for name, value in size.items())]
        for size in fitting:
            if all(value == batch.sizes[name] for name, value in size.items()):
                return Choice(mode, size, 0, "captured at these sizes")
        padded = [size for size in fitting if batch.uniform_decode or not BatchDescriptor(size).uniform_decode]
        refusal = captured.unpadded.get(mode, "")
        if padded and not refusal:
            size = min(padded, key=lambda size: (math.prod(size.values()), *size.values()))
            rows = BatchDescriptor({**batch.sizes, **size}).num_tokens - batch.num_tokens
            return Choice(mode, size, rows, f"padded from {point_label(_among(batch.sizes, size))}")
        failure = captured.failures.get(mode, "")
        reasons.append(failure if failure and not sizes else _reason(mode, sizes, fitting, padded, refusal))
    return Choice("compiled", {}, 0, "; ".join(reasons))


def _among(sizes: Mapping[str, int], names: Mapping[str, int]) -> dict[str, int]:
    return {name: sizes[name] for name in names}


def _reason(
    mode: str, sizes: tuple[dict[str, int], ...], fitting: list[dict[str, int]], padded: list[dict[str, int]],
    refusal: str,
) -> str:  # fmt: skip
    """Why no graph of a mode serves the batch."""
    if not sizes:
        return f"no {mode} graph is captured"
    if not fitting:
        return f"larger than any {mode} graph"
    if not padded:
        return f"{mode} graphs of one token per request are for decoding alone"
    return f"no {mode} graph of these sizes, and {refusal}"
