# mypy: ignore-errors
"""The Triton kernels of `fxc::norm_fp8` and `fxc::gated_fp8`. Imported when one is first launched or traced.

A program has ROWS rows in registers, or parts of them where no number depends on a whole row: each is read once and
written once. Columns from WIDTH on are zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale_of(y, DIVISOR: tl.constexpr, FLOOR: tl.constexpr):
    """The scale of what lies along the last dimension; NaN where some of it is."""
    top = tl.reduce(tl.abs(y), len(y.shape) - 1, _larger) / DIVISOR
    return tl.maximum(top, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sum_and_larger(a, b, c, d):
    return a + c, _larger(b, d)


@triton.jit
def _cast(y, LIMIT: tl.constexpr, kind: tl.constexpr):
    return tl.clamp(y, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(kind)


@triton.jit
def _inverse(scale):
    """1 / scale, one division for all that share it; kept finite for subnormal scales, as 0 times infinity is NaN."""
    inverse = 1.0 / scale
    return tl.where(scale == 0, inverse, _cast(inverse, 3.4028234663852886e38, tl.float32))


@triton.jit(do_not_specialize=["rows"])
def norm(
    x, residual, weight, scale, quantised, scales, total, rows, x_row, residual_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STATIC: tl.constexpr, INVERSE: tl.constexpr,
    GROUP: tl.constexpr, LIMIT: tl.constexpr, DIVISOR: tl.constexpr, FLOOR: tl.constexpr,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (rows / ROWS)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    to = row[:, None] * WIDTH + column[None, :]
    if STATIC:  # this and the weight are loaded here, so that they do not wait for the sum
        factor = tl.load(scale) if INVERSE else _inverse(tl.load(scale))
    if WEIGHT:
        weights = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    y = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + row[:, None] * residual_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        rounded = y.to(total.dtype.element_ty)
        tl.store(total + to, rounded, mask=inside)
        y = rounded.to(tl.float32)
    if STATIC or GROUP:
        y *= tl.rsqrt(tl.sum(y * y, 1) / WIDTH + EPS)[:, None]
        if WEIGHT:
            y *= (weights.to(tl.float32) + OFFSET)[None, :]
    else:
        # Both reductions of a row at once: its largest entry times the norm's factor is that of the normed row. NaN
        # where an entry times its weight is beyond float32.
        square = y * y
        if WEIGHT:
            y *= (weights.to(tl.float32) + OFFSET)[None, :]
        squares, top = tl.reduce((square, tl.abs(y)), 1, _sum_and_larger)
        root = tl.rsqrt(squares / WIDTH + EPS)
        y *= root[:, None]
        found = tl.maximum(top * root / DIVISOR, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    kind: tl.constexpr = quantised.dtype.element_ty
    if STATIC:
        y *= factor
        tl.store(quantised + to, _cast(y, LIMIT, kind), mask=inside)
    else:
        if GROUP:
            y = tl.reshape(y, (ROWS, BLOCK // GROUP, GROUP))
            found = _scale_of(y, DIVISOR, FLOOR)
            group = tl.arange(0, BLOCK // GROUP)
            at = scales + row[:, None] * (WIDTH // GROUP) + group[None, :]
            tl.store(at, found, mask=(row < rows)[:, None] & (group < WIDTH // GROUP)[None, :])
            y = tl.reshape(y * _inverse(found)[:, :, None], (ROWS, BLOCK))
        else:
            tl.store(scales + row, found, mask=row < rows)
            y = y * _inverse(found)[:, None]
        tl.store(quantised + to, _cast(y, LIMIT, kind), mask=inside)


@triton.jit
def _sigmoid(y):
    """1 / (1 + exp(-y)), as the square of a reciprocal root: a third of the instructions that a division is."""
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * y))
    return root * root


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr):
    """SiLU, GELU by erf, GELU by tanh; tanh(z) = 2 sigmoid(2 z) - 1."""
    if ACTIVATION == 0:
        opened = _sigmoid(y)
    elif ACTIVATION == 1:
        opened = 0.5 * (1.0 + tl.erf(y * 0.7071067811865476))
    else:
        opened = _sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    return y * opened


@triton.jit(do_not_specialize=["rows"])
def gated(
    gate, up, scale, quantised, scales, rows, gate_row, up_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STATIC: tl.constexpr, INVERSE: tl.constexpr,
    GROUP: tl.constexpr, LIMIT: tl.constexpr, DIVISOR: tl.constexpr, FLOOR: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Grid (rows / ROWS, WIDTH / BLOCK); with one scale for each row, BLOCK holds it all."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    to = row[:, None] * WIDTH + column[None, :]
    if STATIC:
        factor = tl.load(scale) if INVERSE else _inverse(tl.load(scale))
    gates = tl.load(gate + row[:, None] * gate_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row[:, None] * up_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    y = _activated(gates, ACTIVATION) * ups
    kind: tl.constexpr = quantised.dtype.element_ty
    if STATIC:
        y *= factor
        tl.store(quantised + to, _cast(y, LIMIT, kind), mask=inside)
    else:
        if GROUP:
            y = tl.reshape(y, (ROWS, BLOCK // GROUP, GROUP))
            found = _scale_of(y, DIVISOR, FLOOR)
            group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            at = scales + row[:, None] * (WIDTH // GROUP) + group[None, :]
            tl.store(at, found, mask=(row < rows)[:, None] & (group < WIDTH // GROUP)[None, :])
            y = tl.reshape(y * _inverse(found)[:, :, None], (ROWS, BLOCK))
        else:
            found = _scale_of(y, DIVISOR, FLOOR)
            tl.store(scales + row, found, mask=row < rows)
            y = y * _inverse(found)[:, None]
        tl.store(quantised + to, _cast(y, LIMIT, kind), mask=inside)
