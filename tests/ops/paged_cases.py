"""Batches for the paged attention op, and attention written out in float64, one query at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def batch(
    new: Sequence[int],
    lengths: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    value_width: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    pad: int = 0,
) -> tuple[Tensor, ...]:
    """Arguments of the op: blocks in no order, NaN where nobody wrote, nonsense in unused entries of the table."""
    make = torch.Generator().manual_seed(sum(lengths) + width)
    value_width = value_width or width
    counts = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(counts) + 2, generator=make).tolist()
    caches = [
        torch.full((len(blocks), block_size, kv_heads, size), float("nan"), dtype=dtype)
        for size in (width, value_width)
    ]
    table = torch.full((len(lengths), max(counts) + 1), 1_000_000, dtype=torch.int32)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = [blocks.pop() for _ in range(count)]
        table[request, :count] = torch.tensor(mine)
        for j in range(length):
            for cache in caches:
                cache[mine[j // block_size], j % block_size] = torch.randn(cache.shape[2:], generator=make).to(dtype)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    q = torch.randn(sum(new) + pad, heads, width, generator=make).to(dtype)
    return q, *caches, table, torch.tensor(lengths, dtype=torch.int32), starts


def written_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=torch.float64)
    size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request].item(), starts[request + 1].item()
        for token in range(begin, end) if length else ():
            i = length - (end - begin) + token - begin
            seen = [
                j
                for j in range(i + 1)
                if (window is None or i - j < window) and (chunk is None or j // chunk == i // chunk)
            ]
            at = [(int(table[request, j // size]), j % size) for j in seen]
            keys = torch.stack([k_cache[block, slot] for block, slot in at]).double()
            values = torch.stack([v_cache[block, slot] for block, slot in at]).double()
            for head in range(q.shape[1]):
                scores = keys[:, head // group] @ q[token, head].double() * (scale or q.shape[-1] ** -0.5)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head, None].double()))
                out[token, head] = scores.softmax(0)[: len(seen)] @ values[:, head // group]
    return out


MIXED = ([5, 1, 0, 3, 1, 20, 2], [20, 40, 0, 3, 33, 50, 0])
"""Chunks of a prefill, whole and begun, decode, a pad request without tokens, and one with."""
DECODE = ([1, 1, 1, 0, 0], [1, 16, 35, 0, 0])
ONE = ([70], [90])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"window": 1},
    {"window": 7},
    {"window": 1000},
    {"chunk": 8},
    {"softcap": 2.0},
    {"softcap": 2.0, "window": 20, "chunk": 32, "scale": 0.5},
]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
