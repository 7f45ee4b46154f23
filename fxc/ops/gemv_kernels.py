# mypy: ignore-errors
"""The Triton kernel of `fxc::gemv`. Imported when it is first launched or traced."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(x, weight, bias, out, row, K: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr):
    """Grid (n,): each program reads one row of the weight, once and in order."""
    n = tl.program_id(0)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, K, TILE):
        k = start + tl.arange(0, TILE)
        inside = k < K
        have = tl.load(weight + n.to(tl.int64) * row + k, mask=inside, other=0.0, eviction_policy="evict_first")
        total += have.to(tl.float32) * tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    result = tl.sum(total, 0)
    if BIAS:
        result += tl.load(bias + n).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty))
