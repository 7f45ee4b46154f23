"""Launches the kernels of `fxc::attention.paged` and `fxc::kv_write`, on tensors or while tracing.

Everything here is arithmetic on shapes: no tensor is read, and sizes may be symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxc.ops import paged_kernels as kernels
from fxc.ops.paged import empty
from fxc.ops.paged_plan import SMS, Launch, decide

Call = Callable[..., None]
"""`call(kernel, grid, *arguments, **options)` launches, or notes that it should be."""
BY = {"token": kernels.TOKEN.value, "request": kernels.REQUEST.value, "tile": kernels.TILE.value}


def run(kernel: Any, grid: tuple[Any, ...], *args: Any, **options: Any) -> None:
    """Launch now."""
    registers = options.get("REGISTERS") or None
    kernel[grid](*args, **options, **({} if registers is None else {"maxnreg": registers}))


def trace(kernel: Any, grid: tuple[Any, ...], *args: Any, **options: Any) -> None:
    """Put a node for the launch into the graph that is being traced."""
    torch.library.wrap_triton(kernel)[grid](*args, **options)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    output_inverse: bool = False,
    out: Tensor | None = None,
    plan: tuple[Launch, ...] | None = None,
    sms: int = SMS,
    call: Call = run,
) -> Tensor:
    """`fxc::attention.paged` by the kernels; arguments are taken as checked."""
    tokens, heads, d = q.shape
    block, kv_heads, dv = v_cache.shape[1:]
    if out is None:
        out = empty(q, v_cache, output_scale)
    if q.stride(2) != 1:
        q = q.contiguous()
    requests = seq_lens.shape[0]
    if plan is None:
        width = block_table.shape[1]
        plan = decide(
            _known(tokens), _known(requests), heads=heads, kv_heads=kv_heads, d=d, dv=dv, itemsize=q.element_size(),
            max_keys=width * block if isinstance(width, int) else None, sms=sms,
        )  # fmt: skip
    marks = {"WINDOW": window or 0, "CHUNK": chunk or 0}
    marks |= {"QUANTISE": output_scale is not None, "INVERSE": output_inverse}
    factor = q if output_scale is None else output_scale
    group = heads // kv_heads
    for launch in plan:
        queries = launch.queries(group)
        tiles = {"token": tokens, "request": requests, "tile": tokens // queries + requests + 1}[launch.by]
        shared = {"BY": BY[launch.by], "KEYS": launch.keys, "DV": dv, "DV_PAD": _pad(dv), "QUERIES": queries}
        shared |= {"SKIP": launch.skip, **marks}
        parts = sums = q  # not touched without splits
        lines = requests * queries if launch.by == "request" else tokens
        if launch.splits > 1:
            parts = q.new_empty((lines, heads, launch.splits, dv), dtype=torch.float32)
            sums = q.new_empty((lines, heads, launch.splits), dtype=torch.float32)
        call(
            kernels.attend, (tiles * kv_heads, launch.splits),
            q, k_cache, v_cache, block_table, seq_lens, query_starts, q if sinks is None else sinks, factor, out, parts,
            sums, tokens, requests, launch.splits, tiles,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            block_table.stride(0), out.stride(0), out.stride(1),
            ROWS=launch.rows, GROUP=group, KV_HEADS=kv_heads, BLOCK=block, D=d, D_PAD=_pad(d),
            SCALE=d**-0.5 if scale is None else scale, SOFTCAP=softcap or 0.0, SINKS=sinks is not None,
            SPLIT=launch.splits > 1, REGISTERS=launch.registers or 0, **shared,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        if launch.splits > 1:
            many = min(32, _pad(launch.splits, 1))
            call(
                kernels.merge, (lines, heads),
                parts, sums, seq_lens, query_starts, factor, out, tokens, requests, launch.splits, out.stride(0),
                out.stride(1),
                HEADS=heads, MANY=many, **shared, num_warps=max(1, min(4, many * _pad(dv) // 1024)),
            )  # fmt: skip
    return out


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, call: Call = run) -> None:
    """`fxc::kv_write` by its kernel; arguments are taken as checked."""
    k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (k, v))
    tokens, heads, d = k.shape
    dv = v.shape[2]
    some = min(_pad(heads, 1), max(1, 4096 // _pad(max(d, dv))))
    call(
        kernels.write, (tokens, -(-heads // some)),
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        HEADS=heads, SOME=some, BLOCK=k_cache.shape[1], D=d, DV=dv, D_PAD=_pad(d), DV_PAD=_pad(dv), num_warps=4,
    )  # fmt: skip


def _known(size: Any) -> int | None:
    """A size, if it is a number and no symbol."""
    return size if isinstance(size, int) else None


def _pad(width: int, least: int = 16) -> int:
    """The least power of two that is not below either."""
    return 1 << (max(least, width) - 1).bit_length()
