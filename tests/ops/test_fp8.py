"""`fxc::norm_fp8` and `fxc::gated_fp8` against float64, their kernels under Triton's interpreter, and compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fxc.ops.fp8 import gated_fp8, gated_reference, norm_fp8, norm_reference
from fxc.ops.fp8_plan import parts, whole_rows

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 256), (3, 100), (2, 3, 128), (1, 1), (0, 256))
HOW: dict[str, dict[str, Any]] = {
    "static": {"scale": 0.03},
    "static, inverse": {"scale": 0.7, "inverse": True},
    "per token": {"floor": 1e-6},
    "other constants": {"limit": 240.0, "divisor": 240.0, "floor": 0.5},
    "per block": {"group": 128, "floor": 1e-6},
}


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def split(options: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    scale = options.get("scale")
    return None if scale is None else torch.tensor(scale), {k: v for k, v in options.items() if k != "scale"}


def close(found: tuple[Tensor, Tensor], y: Tensor, options: dict[str, Any]) -> None:
    """Within half a step of FP8 of what float64 gives; scales to float32's precision."""
    quantised, scales = found
    scale, rest = split(options)
    limit, group = rest.get("limit", 448.0), rest.get("group", 0)
    rows = y.unflatten(-1, (-1, group)) if group else y
    if scale is None:
        right = (rows.abs().amax(-1, keepdim=True) / rest.get("divisor", 448.0)).clamp(min=rest["floor"])
        want = right.squeeze(-1) if group else right
        assert scales.dtype == torch.float32
        torch.testing.assert_close(scales.double(), want, rtol=2e-6, atol=0)
        ratio = rows / right
    else:
        assert scales.shape == (0,)
        ratio = rows * scale.double() if rest.get("inverse") else rows / scale.double()
    ratio = (ratio.flatten(-2) if group else ratio).clamp(-limit, limit)
    assert (quantised.dtype, quantised.shape) == (FP8, y.shape)
    step = torch.maximum(ratio.abs() / 16, torch.tensor(2.0**-10, dtype=torch.float64))
    assert bool(((quantised.double() - ratio).abs() <= step * 1.001).all())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers(shape: tuple[int, ...], dtype: torch.dtype, how: str) -> None:
    scale, options = split(HOW[how])
    if shape[-1] % options.get("group", 1) or (shape[0] == 0 and scale is None):
        pytest.skip("no blocks of 128 in such a row, or no row")
    x, residual, weight = made(shape, dtype), made(shape, dtype, 1), made(shape[-1:], dtype, 2)
    for more, offset in ((residual, 1.0), (None, 0.0)):
        total = x if more is None else x + more
        wide = total.double()
        y = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
        quantised, scales, found = norm_fp8(x, more, weight, scale, eps=1e-5, offset=offset, **options)
        close((quantised, scales), y, HOW[how])
        assert torch.equal(found, total) if more is not None else found.shape == (0,)
    for number, activation in enumerate((silu, gelu, lambda z: gelu(z, approximate="tanh"))):
        y = activation(x.double()) * residual.double()
        close(gated_fp8(x, residual, scale, activation=number, **options), y, HOW[how])


def test_without_weight() -> None:
    x = made((3, 64), torch.float32)
    plain = norm_fp8(x, None, None, None, eps=1e-5, floor=1e-6)
    ones = norm_fp8(x, None, torch.ones(64), None, eps=1e-5, floor=1e-6)
    assert torch.equal(plain[0].float(), ones[0].float())


@pytest.mark.parametrize("how", ["static", "per token", "per block"])
def test_rows_out_of_the_ordinary(how: str) -> None:
    """Zeros stay zeros, NaN stays NaN, what is too large becomes the largest."""
    scale, options = split(HOW[how])
    x = made((4, 256), torch.float32)
    x[0], x[1, 3] = 0, float("nan")
    up = torch.ones_like(x)
    up[2] = 1e30
    quantised, scales = gated_fp8(x, up, scale, **options)
    norms = norm_fp8(x, None, up[0], scale, eps=1e-5, **options)
    for found in (quantised, norms[0]):
        assert not found[0].float().any()
        assert bool(found[1, 3].float().isnan())
        assert bool(found[2:].float().isfinite().all())
    assert float(quantised[2].float().abs().max()) == 448
    if scale is None:
        assert bool((scales[0] == options["floor"]).all())
        assert bool(scales[1, 0].isnan())
    else:
        assert bool(quantised[1, 4:].float().isfinite().all())


def test_without_a_floor_a_row_of_zeros_is_nan_as_it_is_in_eager() -> None:
    quantised, scales = gated_fp8(torch.zeros(1, 8), torch.zeros(1, 8), None)
    assert not scales.any()
    assert bool(quantised.float().isnan().all())


def test_fakes_agree_with_the_references() -> None:
    x = made((3, 256), torch.bfloat16)
    for how in HOW.values():
        scale, options = split(how)
        meta = None if scale is None else scale.to("meta")
        far = x.to("meta")
        pairs = [
            (
                norm_reference(x, x, x[0], scale, eps=1e-5, **options),
                norm_fp8(far, far, far[0], meta, eps=1e-5, **options),
            ),
            (gated_reference(x, x, scale, **options), gated_fp8(far, far, meta, **options)),
        ]
        for want, found in pairs:
            assert [(t.dtype, t.shape, t.stride()) for t in found] == [(t.dtype, t.shape, t.stride()) for t in want]


def test_rows_are_shared_out() -> None:
    for width in (1, 16, 100, 1000, 4096, 8192, 16384):
        block, rows, warps = whole_rows(width)
        assert block >= width
        assert block & (block - 1) == 0
        assert block < 2 * max(width, 16)
        assert rows * block >= 2048
        assert rows == 1 or rows * block == 2048
        assert warps in (8, 16)


def test_rows_are_taken_apart() -> None:
    assert parts(16384) == parts(1024) == (1024, 1, 4)
    assert parts(100) == (128, 8, 4)
    assert parts(4096, 128) == (1024, 1, 4)
    assert parts(4096, 2048) == (2048, 1, 8), "a group is not taken apart"
    assert parts(1) == (16, 64, 4)
    assert parts(16384, 16384) == (16384, 1, 16)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_under_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    script = Path(__file__).parent / "interpret.py"
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout
