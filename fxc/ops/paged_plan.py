"""Which kernels a call of `fxc::attention.paged` launches, with which tiles: a pure function of static sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SMS = 132
"""Multiprocessors of an H100 or H200, where nothing else is said."""


@dataclass(frozen=True)
class Launch:
    """One launch of `attend`, and of `merge` if there are splits."""

    by: Literal["token", "request", "tile"]
    """What a tile holds: one token, the few queries of a request, or a part of a request's queries."""
    rows: int
    """Rows of a tile: queries times the query heads of one key/value head."""
    keys: int
    """Keys per step."""
    splits: int
    """Programs that share the keys of a tile."""
    warps: int
    stages: int
    registers: int | None = None
    """The most that a thread may have, so that more programs fit on a multiprocessor."""
    skip: int = 0
    """Requests of up to so many queries are another launch's."""

    def queries(self, group: int) -> int:
        return 1 if self.by == "token" else self.rows // group


def decide(
    tokens: int | None,
    requests: int | None,
    *,
    heads: int,
    kv_heads: int,
    d: int,
    dv: int,
    itemsize: int = 2,
    max_keys: int | None = None,
    sms: int = SMS,
) -> tuple[Launch, ...]:
    """The launches for a batch of `tokens` in `requests`; None is a size that is a symbol while tracing.

    - No more tokens than requests: decode. A tile for each token, keys split until there are enough programs.
    - One request: prefill. Wide tiles.
    - Else both may be in the batch: narrow tiles, split, for requests whose queries fit into one, wide ones for the
      rest. One kind for both would either read the keys once for every few queries, or multiply 128 rows for one.
    """
    group = heads // kv_heads
    narrow = max(16, _power(group))
    wide = _wide(tokens, group, max(d, dv), itemsize)
    decode = tokens is not None and requests is not None and tokens <= requests
    if decode:
        return (_narrow("token", narrow, tokens, kv_heads, max(d, dv), itemsize, max_keys, sms),)
    few = narrow // group
    rows, keys, warps, stages = wide
    if requests == 1:
        tiles = None if tokens is None else tokens // (rows // group) + 2
        return (Launch("tile", rows, keys, _splits(tiles, kv_heads, sms, keys, max_keys), warps, stages),)
    return (
        Launch("tile", rows, keys, 1, warps, stages, skip=few),
        _narrow("request", narrow, requests, kv_heads, max(d, dv), itemsize, max_keys, sms),
    )


def _narrow(
    by: Literal["token", "request"],
    rows: int,
    tiles: int | None,
    kv_heads: int,
    width: int,
    itemsize: int,
    max_keys: int | None,
    sms: int,
) -> Launch:
    """Reads as fast as memory gives: two to four tiles of keys and values in flight on a multiprocessor."""
    keys = max(16, min(64, 16384 // (_power(width) * itemsize)))
    return Launch(by, rows, keys, _splits(tiles, kv_heads, sms, keys, max_keys), warps=4, stages=3)


def _wide(tokens: int | None, group: int, width: int, itemsize: int) -> tuple[int, int, int, int]:
    """Rows, keys, warps, stages: as many rows as registers hold, so that a key that was read is used often."""
    rows = 128 if tokens is None or tokens * group > 1024 else 64
    rows = max(rows, _power(group))
    if itemsize > 2:
        return max(32, _power(group)), 32, 4, 1 if width > 128 else 2
    return rows, 64 if width > 64 else 128, 8 if rows > 64 else 4, 2 if width > 128 else 3


def _splits(tiles: int | None, kv_heads: int, sms: int, keys: int, max_keys: int | None) -> int:
    """Programs per tile until each multiprocessor has PER_SM of them; a symbolic number of tiles gets 1."""
    if tiles is None:
        return 1
    most = 64 if max_keys is None else max(1, math.ceil(max_keys / keys))
    return max(1, min(most, 64, sms * PER_SM // max(1, tiles * kv_heads)))


PER_SM = 4


def _power(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()
