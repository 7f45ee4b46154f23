"""Which kernels a call of `fxc::attention.paged` launches, with which tiles: a pure function of static sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

SMS = 132
"""Multiprocessors of an H100 or H200, where nothing else is said."""
MAX_SPLITS = 64


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

    - No more tokens than requests: decode. A tile for each token, its keys shared until there are enough programs.
    - One request: prefill. Wide tiles.
    - Else both may be in the batch: narrow tiles for requests whose queries fit into one, wide ones for the rest. One
      kind for both would read all keys once for every few queries, or multiply 128 rows for one query.
    """
    group, width = heads // kv_heads, _power(max(d, dv))
    most = MAX_SPLITS * 64 if max_keys is None else max_keys
    if tokens is not None and requests is not None and tokens <= requests:
        return (_narrow("token", tokens, group, kv_heads, width, itemsize, most, sms),)
    wide = _wide(tokens, group, width, itemsize)
    if requests == 1:
        tiles = None if tokens is None else -(-tokens // wide.queries(group))
        return (_share(wide, tiles, kv_heads, sms, most),)
    narrow = _narrow("request", requests, group, kv_heads, width, itemsize, most, sms)
    tiles = None if tokens is None or requests is None else tokens // wide.queries(group) + requests + 1
    return (_share(replace(wide, skip=narrow.queries(group)), tiles, kv_heads, sms, most), narrow)


def _narrow(
    by: Literal["token", "request"],
    tiles: int | None,
    group: int,
    kv_heads: int,
    width: int,
    itemsize: int,
    max_keys: int,
    sms: int,
) -> Launch:
    """Waits for memory: few warps, as they wait for each other, and a tile of 32 kB in flight for each program."""
    rows = max(16, _power(group))
    keys = max(16, min(64, 16384 // (width * itemsize)))
    return _share(Launch(by, rows, keys, 1, 2 if rows == 16 else 4, 3), tiles, kv_heads, sms, max_keys)


def _wide(tokens: int | None, group: int, width: int, itemsize: int) -> Launch:
    """As many rows as registers hold, so that what was read is used often, and where it can be two programs on a
    multiprocessor, so that one multiplies while the other is at its softmax: 128 registers a thread, a few spilled."""
    if itemsize > 2:
        return Launch("tile", max(32, _power(group)), 32, 1, 4, 1 if width > 128 else 2)
    rows = max(128 if tokens is None or tokens * group > 1024 else 64, _power(group))
    if rows > 64:
        return Launch("tile", rows, 64, 1, 8, 2, registers=128 if width <= 128 else None)
    return Launch("tile", rows, 64, 1, 4, 2)


def _share(launch: Launch, tiles: int | None, kv_heads: int, sms: int, max_keys: int) -> Launch:
    """With as many splits as keep all multiprocessors busy; a number of tiles that is a symbol gets none."""
    if tiles is None:
        return launch
    programs = sms * (2 if launch.by == "tile" else 4)
    splits = min(programs // max(1, tiles * kv_heads), MAX_SPLITS, -(-max_keys // launch.keys))
    return replace(launch, splits=max(1, splits))


def _power(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()
