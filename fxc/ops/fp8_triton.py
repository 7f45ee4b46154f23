"""Launches the kernels of `fxc::norm_fp8` and `fxc::gated_fp8`, on tensors or while tracing; sizes may be symbols."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxc.ops import fp8_kernels as kernels
from fxc.ops.fp8 import empty_scales
from fxc.ops.fp8_plan import Tiles, parts, whole_rows
from fxc.ops.paged_triton import Call, run


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, scale: Tensor | None, *, eps: float, offset: float = 0.0,
    call: Call = run, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`fxc::norm_fp8` by its kernel; arguments are taken as checked."""
    rows, more = _rows(x), None if residual is None else _rows(residual)
    quantised, scales = _results(x, scale, options)
    total = x.new_empty(0 if residual is None else x.shape)
    _launch(
        kernels.norm, whole_rows(rows.shape[1]), rows,
        (rows, rows if more is None else more, rows if weight is None else weight.contiguous()), scale, quantised,
        scales, (total,), (rows.stride(0), rows.stride(0) if more is None else more.stride(0)), options, call,
        RESIDUAL=residual is not None, WEIGHT=weight is not None, EPS=eps, OFFSET=offset,
    )  # fmt: skip
    return quantised, scales, total


def gated(
    gate: Tensor, up: Tensor, scale: Tensor | None, *, activation: int = 0, call: Call = run, **options: Any
) -> tuple[Tensor, Tensor]:
    """`fxc::gated_fp8` by its kernel; arguments are taken as checked."""
    gates, ups = _rows(gate), _rows(up)
    quantised, scales = _results(gate, scale, options)
    width, group = gates.shape[1], options.get("group", 0)
    plan = whole_rows(width) if scale is None and not group else parts(width, group)
    _launch(
        kernels.gated, plan, gates, (gates, ups), scale, quantised, scales, (), (gates.stride(0), ups.stride(0)),
        options, call, ACTIVATION=activation,
    )  # fmt: skip
    return quantised, scales


def _rows(x: Tensor) -> Tensor:
    """[rows, width], neighbours side by side."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _results(x: Tensor, scale: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    quantised = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return quantised, empty_scales(x, scale, options.get("group", 0))


def _launch(
    kernel: Any, plan: Tiles, rows: Tensor, reads: tuple[Tensor, ...], scale: Tensor | None, quantised: Tensor,
    scales: Tensor, writes: tuple[Tensor, ...], strides: tuple[Any, ...], options: dict[str, Any], call: Call,
    **constants: Any,
) -> None:  # fmt: skip
    count, width = rows.shape
    block, many, warps = plan
    call(
        kernel, ((count + many - 1) // many, -(-width // block)),
        *reads, scales if scale is None else scale, quantised, scales, *writes, count, *strides,
        WIDTH=width, BLOCK=block, ROWS=many, STATIC=scale is not None, INVERSE=options.get("inverse", False),
        GROUP=options.get("group", 0), LIMIT=options.get("limit", 448.0), DIVISOR=options.get("divisor", 448.0),
        FLOOR=options.get("floor", 0.0), num_warps=warps, **constants,
    )  # fmt: skip
