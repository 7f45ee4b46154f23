# mypy: ignore-errors
"""The Triton kernels of `fxc::norm_rope` and `fxc::norm_rope_write`. Imported when one is first launched or traced.

What torch takes for written is what is stored to in any branch that is compiled, hence BOTH: of one tensor alone, the
arguments of the other one are its own again.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weight(at, there, OFFSET: tl.constexpr):
    weight = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if OFFSET != 0:  # x + 0 is an instruction, as it turns -0 into 0
        weight += OFFSET
    return weight


@triton.jit
def _turn(
    x, out, weight, cos, sin, x_head, out_head, chunk, keep,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, FULL: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """CHUNK heads of a token of one tensor, stored where `keep` is set; the pointers are those of that token."""
    head = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    there, behind = (head < HEADS) & (pair < HALF), (head < HEADS) & (rest < D)
    at = x + head * x_head
    to = out + head * out_head
    a = tl.load(at + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=there, other=0.0).to(tl.float32)
    if FULL:
        cos_a = tl.load(cos + first, mask=pair < HALF, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + first, mask=pair < HALF, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + second, mask=pair < HALF, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + second, mask=pair < HALF, other=0.0).to(tl.float32)
    else:
        cos_a = tl.load(cos + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        cos_b = cos_a
        sin_b = sin_a
    if D > 2 * HALF:
        more = tl.load(at + rest, mask=behind, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a + b * b, 1)  # one sum across threads, not two
        if D > 2 * HALF:
            squares += tl.sum(more * more, 1)
        factor = tl.rsqrt(squares / D + EPS)[:, None]
        a *= factor
        b *= factor
        if WEIGHT:
            a *= _weight(weight + first, pair < HALF, OFFSET)
            b *= _weight(weight + second, pair < HALF, OFFSET)
        if D > 2 * HALF:
            more *= factor
            if WEIGHT:
                more *= _weight(weight + rest, rest < D, OFFSET)
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(to + first, (a * cos_a - b * sin_a).to(kind), mask=there & keep)
    tl.store(to + second, (b * cos_b + a * sin_b).to(kind), mask=there & keep)
    if D > 2 * HALF:
        tl.store(to + rest, more.to(kind), mask=behind & keep)


@triton.jit
def norm_rope(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, q_token, q_head, k_token, k_head, table_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, FULL: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Grid (tokens * CHUNKS), CHUNKS being those of the heads of q, and of k where there are both tensors."""
    token = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    q_chunks: tl.constexpr = (Q_HEADS + CHUNK - 1) // CHUNK
    cos += token * table_token
    sin += token * table_token
    if chunk < q_chunks:
        _turn(
            q + token * q_token, q_out + token * (Q_HEADS * D), q_weight, cos, sin, q_head, D, chunk, True,
            Q_HEADS, CHUNK, D, HALF, HALF_PAD, REST_PAD, FULL, INTERLEAVED, NORM, WEIGHT, EPS, OFFSET,
        )  # fmt: skip
    elif BOTH:
        _turn(
            k + token * k_token, k_out + token * (K_HEADS * D), k_weight, cos, sin, k_head, D, chunk - q_chunks, True,
            K_HEADS, CHUNK, D, HALF, HALF_PAD, REST_PAD, FULL, INTERLEAVED, NORM, WEIGHT, EPS, OFFSET,
        )  # fmt: skip


@triton.jit
def norm_rope_write(
    q, k, v, q_out, k_cache, v_cache, slots, q_weight, k_weight, cos, sin, q_token, q_head, k_token, k_head,
    v_token, v_head, k_block, k_slot, k_to, v_block, v_slot, v_to, table_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, FULL: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, BOTH: tl.constexpr,
    BLOCK: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (tokens * CHUNKS), CHUNKS being those of the heads of k, and of q where there are queries: the first of a
    token turn its keys and put them and its values into the caches, the others turn its queries."""
    token = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    k_chunks: tl.constexpr = (K_HEADS + CHUNK - 1) // CHUNK
    cos += token * table_token
    sin += token * table_token
    if chunk < k_chunks:
        # What is read does not wait for the slot: a token without one is read in vain.
        head, dv = chunk * CHUNK + tl.arange(0, CHUNK)[:, None], tl.arange(0, DV_PAD)[None, :]
        there = (head < K_HEADS) & (dv < DV)
        slot = tl.load(slots + token)
        values = tl.load(v + token * v_token + head * v_head + dv, mask=there)
        keep = slot >= 0
        slot = tl.where(keep, slot, 0)
        block, inner = slot // BLOCK, slot % BLOCK
        _turn(
            k + token * k_token, k_cache + block * k_block + inner * k_slot, k_weight, cos, sin, k_head, k_to, chunk,
            keep, K_HEADS, CHUNK, D, HALF, HALF_PAD, REST_PAD, FULL, INTERLEAVED, NORM, WEIGHT, EPS, OFFSET,
        )  # fmt: skip
        tl.store(v_cache + block * v_block + inner * v_slot + head * v_to + dv, values, mask=there & keep)
    elif BOTH:
        _turn(
            q + token * q_token, q_out + token * (Q_HEADS * D), q_weight, cos, sin, q_head, D, chunk - k_chunks, True,
            Q_HEADS, CHUNK, D, HALF, HALF_PAD, REST_PAD, FULL, INTERLEAVED, NORM, WEIGHT, EPS, OFFSET,
        )  # fmt: skip
