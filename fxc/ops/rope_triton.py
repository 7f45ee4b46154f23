"""Launches the kernels of `fxc::norm_rope` and `fxc::norm_rope_write`, on tensors or while tracing; sizes may be
symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxc.ops import rope_kernels as kernels
from fxc.ops.paged_triton import Call, run

CHUNK = 8
"""Heads of one program. Programs of a token follow each other, so that they read its tables from the L2."""
WRITE_CHUNK = 16
"""The same where some of them write into caches."""
ELEMENTS = 256
"""Of one warp. With more, a thread's work is a longer chain, which few tokens show."""


def norm_rope(
    x: Sequence[Tensor], weights: Sequence[Tensor], cos: Tensor, sin: Tensor, *, rotary: int, interleaved: bool = False,
    norm: bool = False, eps: float = 0.0, offset: float = 0.0, call: Call = run,
) -> list[Tensor]:  # fmt: skip
    """`fxc::norm_rope` of one or two tensors by its kernel; arguments are taken as checked."""
    rows, tables = [_rows(tensor) for tensor in x], [_table(table) for table in (cos, sin)]
    out = [tensor.new_empty(tensor.shape) for tensor in x]
    q, k, chunks = rows[0], rows[-1], _chunks(rows, CHUNK)
    scales = [weight.contiguous() for weight in weights] or [q, q]
    call(
        kernels.norm_rope, (q.shape[0] * chunks,),
        q, k, out[0], out[-1], scales[0], scales[-1], *tables, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        tables[0].shape[1], **_constants(q, k, cos, rotary, CHUNK), CHUNKS=chunks, INTERLEAVED=interleaved, NORM=norm,
        WEIGHT=bool(weights), EPS=eps, OFFSET=offset, BOTH=len(x) == 2,
    )  # fmt: skip
    return out


def norm_rope_write(
    x: Sequence[Tensor], v: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, *, rotary: int, interleaved: bool = False, norm: bool = False,
    eps: float = 0.0, offset: float = 0.0, call: Call = run,
) -> list[Tensor]:  # fmt: skip
    """`fxc::norm_rope_write` of keys, or queries and keys, by its kernel; arguments are taken as checked."""
    rows, tables = [_rows(tensor) for tensor in x], [_table(table) for table in (cos, sin)]
    out = [tensor.new_empty(tensor.shape) for tensor in x[:-1]]
    q, k, chunks = rows[0], rows[-1], _chunks(rows, WRITE_CHUNK)
    v = _rows(v)
    scales = [weight.contiguous() for weight in weights] or [q, q]
    call(
        kernels.norm_rope_write, (k.shape[0] * chunks,),
        q, k, v, out[0] if out else q, k_cache, v_cache, slot_mapping, scales[0], scales[-1], *tables,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3],
        *v_cache.stride()[:3], tables[0].shape[1], **_constants(q, k, cos, rotary, WRITE_CHUNK), CHUNKS=chunks,
        INTERLEAVED=interleaved, NORM=norm, WEIGHT=bool(weights), EPS=eps, OFFSET=offset, BOTH=len(x) == 2,
        BLOCK=k_cache.shape[1], DV=v.shape[2], DV_PAD=_pad(v.shape[2]),
    )  # fmt: skip
    return out


def _constants(q: Tensor, k: Tensor, cos: Tensor, rotary: int, chunk: int) -> dict[str, Any]:
    """What both kernels are compiled for, of rows of queries and keys."""
    d = q.shape[2]
    return {
        "Q_HEADS": q.shape[1], "K_HEADS": k.shape[1], "CHUNK": chunk, "D": d, "HALF": rotary // 2,
        "HALF_PAD": _pad(rotary // 2), "REST_PAD": _pad(max(d - rotary, 1)), "FULL": cos.shape[-1] == rotary,
        "num_warps": min(16, max(1, chunk * _pad(d) // ELEMENTS)),
    }  # fmt: skip


def _chunks(rows: Sequence[Tensor], chunk: int) -> int:
    """Programs that share the heads of a token."""
    return sum(-(-each.shape[1] // chunk) for each in rows)


def _table(table: Tensor) -> Tensor:
    """[tokens, width]"""
    return table.reshape(-1, table.shape[-1]).contiguous()


def _rows(x: Tensor) -> Tensor:
    """[tokens, heads, d], neighbours side by side."""
    rows = x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _pad(width: int) -> int:
    """The least power of two that is not below `width`."""
    return 1 << (width - 1).bit_length()
