# mypy: ignore-errors
"""The Triton kernels of `fxc::attention.paged` and `fxc::kv_write`. Imported when one is first launched or traced.

A program of `attend` computes a tile: up to ROWS rows, one for each pair of a query and one of the GROUP query heads
that read the same key/value head, over KEYS keys at a time. `BY` says which queries a tile holds:

    TOKEN     one token of the batch
    REQUEST   all queries of one request, if they fit into a tile; else nothing
    TILE      ROWS // GROUP queries of one request; tile b belongs to the last r with starts[r] // QUERIES + r <= b

What a grid needs is known from shapes, so programs find their request from the tensors and leave early when there is
none: the last one that begins at or before their tile or token; the first one begins at token 0. They compare with 128
requests in one step, as a binary search is a chain of loads that wait for each other.
With `SPLIT`, the keys of a tile are shared by several programs, which write normalised partial results and their
log-sum-exp, and `merge` puts these together.
"""

from __future__ import annotations

import triton
import triton.language as tl

TOKEN = tl.constexpr(0)
REQUEST = tl.constexpr(1)
TILE = tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Stands for minus infinity where a difference of two of them must not be NaN."""


@triton.jit
def _low(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at `position` sees."""
    low = position * 0
    if WINDOW:
        low = tl.maximum(low, position - WINDOW + 1)
    if CHUNK:
        low = tl.maximum(low, position // CHUNK * CHUNK)
    return low


@triton.jit
def _first_query(request, start, index, QUERIES: tl.constexpr, BY: tl.constexpr):
    """Tile `index` of `request` begins with this one of its queries."""
    query = start * 0
    if BY == TOKEN:
        query = index - start
    if BY == TILE:
        query = (index - (start // QUERIES + request)) * QUERIES
    return query


@triton.jit
def _keys(
    position, length, splits, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr
):
    """Of the tile whose first query is at `position`: its first and last key tile, and how many a split takes."""
    stop = tl.maximum(tl.minimum(position + QUERIES, length), 0)
    first = tl.minimum(_low(tl.maximum(position, 0), WINDOW, CHUNK), stop) // KEYS
    last = tl.cdiv(stop, KEYS)
    return first, last, tl.maximum(tl.cdiv(last - first, splits), 1)


@triton.jit
def _scaled(y, scale, INVERSE: tl.constexpr):
    """What is rounded to FP8."""
    if INVERSE:
        y *= scale
    else:
        y /= scale
    return tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["tokens", "requests", "splits", "tiles"])
def attend(
    q, k, v, table, lengths, starts, sinks, output_scale, out, parts, sums, tokens, requests, splits, tiles,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row, out_token, out_head,
    BY: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    SPLIT: tl.constexpr, QUERIES: tl.constexpr, SKIP: tl.constexpr, REGISTERS: tl.constexpr, QUANTISE: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * KV_HEADS, splits). Requests of up to SKIP queries are left to another launch.

    REGISTERS is not read: it tells who compiles this what Triton's option `maxnreg` should be, 0 for none. Inductor
    drops that option, so that a build has to put it back.
    """
    head = tl.program_id(0) % KV_HEADS
    index = tl.program_id(0) // KV_HEADS
    if BY == TILE:  # late tiles see more keys: the longest programs start first
        index = tiles - 1 - index
    request = tl.minimum(index, requests - 1)  # right for a request, and for a token if each request has one
    start = tl.load(starts + request)
    end = tl.load(starts + request + 1)
    length = tl.load(lengths + request)
    if BY != REQUEST:
        if (BY == TILE) | (start != index) | (end != index + 1):
            request = tl.full([], -1, tl.int32)
            for base in range(0, requests + 1, 128):
                each = base + tl.arange(0, 128)
                begins = tl.load(starts + each, mask=each <= requests, other=0)
                if BY == TILE:
                    begins = begins // QUERIES + each
                request += tl.sum(((begins <= index) & (each <= requests)).to(tl.int32), 0)
            start = tl.load(starts + request)
            end = tl.load(starts + request + 1, mask=request < requests, other=0)
            length = tl.load(lengths + request, mask=request < requests, other=0)
    real = request < requests  # else these are the tokens behind the last request, as one of length 0
    count = tl.where(real, end, tokens) - start
    query = _first_query(request, start, index, QUERIES, BY)
    if query >= count:
        return
    if BY == REQUEST:
        if count > QUERIES:
            return
    if (SKIP > 0) & real & (count <= SKIP):
        return
    first, last, share = _keys(length - count + query, length, splits, QUERIES, KEYS, WINDOW, CHUNK)
    if SPLIT:
        first += tl.program_id(1) * share
        last = tl.minimum(last, first + share)
        if first >= last:
            return

    row = tl.arange(0, ROWS)
    mine = query + row // GROUP
    valid = (row // GROUP < QUERIES) & (mine < count)
    heads = head * GROUP + row % GROUP
    token = (start + mine).to(tl.int64)
    position = length - count + mine
    low = _low(tl.maximum(position, 0), WINDOW, CHUNK)
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    at = q + (token * q_token + heads * q_head)[:, None] + d[None, :]
    rows = tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0)

    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # one more key, for the first of the programs that share a tile
        if tl.program_id(1) == 0:
            top = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    k += head * k_head
    v += head * v_head
    table += request.to(tl.int64) * table_row

    begin = length - count + query
    stop = tl.minimum(begin + QUERIES, length)
    floor = _low(tl.maximum(begin, 0), WINDOW, CHUNK)
    # In the tiles from `inner` to `outer`, every row sees every key.
    inner = tl.cdiv(_low(tl.maximum(stop - 1, 0), WINDOW, CHUNK), KEYS)
    outer = (tl.maximum(begin, -1) + 1) // KEYS
    factor: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E  # of scores, to base 2; positive
    lanes = tl.arange(0, KEYS)
    for tile in range(first, last):
        key = tile * KEYS + lanes
        # What nobody wrote may be NaN, and 0 * NaN is NaN; there, entries of the table may be anything.
        there = (key >= floor) & (key < stop)
        block = tl.load(table + key // BLOCK, mask=there, other=0).to(tl.int64)
        k_at = k + (block * k_block + key % BLOCK * k_slot)[None, :] + d[:, None]
        v_at = v + (block * v_block + key % BLOCK * v_slot)[:, None] + dv[None, :]
        k_mask, v_mask = there[None, :], there[:, None]
        if D != D_PAD:
            k_mask = k_mask & (d < D)[:, None]
        if DV != DV_PAD:
            v_mask = v_mask & (dv < DV)[None, :]
        scores = tl.dot(rows, tl.load(k_at, mask=k_mask, other=0.0), input_precision="ieee")
        if SOFTCAP > 0:  # tanh(x) = 2 sigmoid(2 x) - 1
            scores = 2 * tl.sigmoid(2 * SCALE / SOFTCAP * scores) - 1
        if (tile < inner) | (tile >= outer):
            seen = (key[None, :] >= low[:, None]) & (key[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        faded = tl.exp2(top - higher)
        total = total * faded + tl.sum(weights, 1)
        top = higher
        values = tl.load(v_at, mask=v_mask, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * faded[:, None], input_precision="ieee")

    total = tl.where(total > 0, total, 1.0)  # a row without keys: 0 and LOWEST
    acc = acc / total[:, None]
    inside = valid[:, None] & (dv < DV)[None, :]
    if SPLIT:
        line = token if BY != REQUEST else index.to(tl.int64) * QUERIES + mine
        line = (line * (KV_HEADS * GROUP) + heads) * splits + tl.program_id(1)
        tl.store(parts + line[:, None] * DV + dv[None, :], acc, mask=inside)
        tl.store(sums + line, top + tl.log2(total), mask=valid)
    else:
        if QUANTISE:
            acc = _scaled(acc, tl.load(output_scale), INVERSE)
        to = out + (token * out_token + heads * out_head)[:, None] + dv[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "requests", "splits"])
def merge(
    parts, sums, lengths, starts, output_scale, out, tokens, requests, splits, out_token, out_head,
    BY: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, QUERIES: tl.constexpr, SKIP: tl.constexpr, MANY: tl.constexpr,
    QUANTISE: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (lines, HEADS): a line is a token, or with REQUEST a query of a request. MANY partial results at a time."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    # The first results are loaded before it is known how many there are: this and what follows wait for memory at once.
    dv, lanes = tl.arange(0, DV_PAD), tl.arange(0, MANY)
    line = (index.to(tl.int64) * HEADS + head) * splits
    logs = tl.load(sums + line + lanes, mask=lanes < splits, other=LOWEST)
    at = parts + (line + lanes)[:, None] * DV + dv[None, :]
    values = tl.load(at, mask=(lanes < splits)[:, None] & (dv < DV)[None, :], other=0.0)
    request = tl.minimum(index // QUERIES, requests - 1)  # right for a request, and for a token if each request has one
    start = tl.load(starts + request)
    end = tl.load(starts + request + 1)
    length = tl.load(lengths + request)
    # As in `attend`, and not a function of both: places in memory that follow from what a nested function loads through
    # pointers make torch take every tensor for written.
    if BY != REQUEST:
        if (BY == TILE) | (start != index) | (end != index + 1):
            request = tl.full([], -1, tl.int32)
            for base in range(0, requests + 1, 128):
                each = base + tl.arange(0, 128)
                begins = tl.load(starts + each, mask=each <= requests, other=0)
                request += tl.sum(((begins <= index) & (each <= requests)).to(tl.int32), 0)
            start = tl.load(starts + request)
            end = tl.load(starts + request + 1, mask=request < requests, other=0)
            length = tl.load(lengths + request, mask=request < requests, other=0)
    real = request < requests  # else these are the tokens behind the last request, as one of length 0
    count = tl.where(real, end, tokens) - start
    mine = index - start
    if BY == REQUEST:
        mine = index % QUERIES
        if count > QUERIES:
            return
    if mine >= count:
        return
    if (SKIP > 0) & real & (count <= SKIP):
        return
    first, last, share = _keys(length - count + mine // QUERIES * QUERIES, length, splits, QUERIES, KEYS, WINDOW, CHUNK)
    used = tl.cdiv(last - first, share)

    logs = tl.where(lanes < used, logs, LOWEST)
    values = tl.where((lanes < used)[:, None], values, 0.0)
    top = tl.max(logs, 0)
    weights = tl.where(lanes < used, tl.exp2(logs - top), 0.0)
    acc = tl.sum(weights[:, None] * values, 0)
    total = tl.sum(weights, 0)
    for base in range(MANY, used, MANY):
        part = base + lanes
        there = part < used
        logs = tl.load(sums + line + part, mask=there, other=LOWEST)
        at = parts + (line + part)[:, None] * DV + dv[None, :]
        values = tl.load(at, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(logs, 0))
        weights = tl.where(there, tl.exp2(logs - higher), 0.0)
        faded = tl.exp2(top - higher)
        acc = acc * faded + tl.sum(weights[:, None] * values, 0)
        total = total * faded + tl.sum(weights, 0)
        top = higher
    acc = acc / tl.where(total > 0, total, 1.0)
    if QUANTISE:
        acc = _scaled(acc, tl.load(output_scale), INVERSE)
    to = out + (start + mine).to(tl.int64) * out_token + head * out_head + dv
    tl.store(to, acc.to(out.dtype.element_ty), mask=dv < DV)


@triton.jit
def write(
    k, v, k_cache, v_cache, slots, k_token, k_head, v_token, v_head, k_block, k_slot, k_to, v_block, v_slot, v_to,
    HEADS: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, heads / SOME): copy a token's keys and values to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.program_id(1) * SOME + tl.arange(0, SOME)[:, None]
    d, dv = tl.arange(0, D_PAD)[None, :], tl.arange(0, DV_PAD)[None, :]
    keys = tl.load(k + token * k_token + head * k_head + d, mask=(head < HEADS) & (d < D))
    values = tl.load(v + token * v_token + head * v_head + dv, mask=(head < HEADS) & (dv < DV))
    block, inner = slot // BLOCK, slot % BLOCK
    tl.store(k_cache + block * k_block + inner * k_slot + head * k_to + d, keys, mask=(head < HEADS) & (d < D))
    tl.store(v_cache + block * v_block + inner * v_slot + head * v_to + dv, values, mask=(head < HEADS) & (dv < DV))
