"""What passes put in, on an NVIDIA GPU: kernels against the references, and a model in FP8 built and run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxc
from fxc.ops.fp8 import gated_reference, norm_reference
from fxc.ops.rope import reference
from fxc.prove import row_errors
from tests.ops.paged_cases import DECODE, MIXED, ONE, batch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs an NVIDIA GPU with FP8"
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "fp8_llama.yaml"
SHAPES = ((1, 4096), (7, 100), (3, 1), (2, 5, 1000), (64, 8192), (3, 16384), (33, 256))
HOW: dict[str, dict[str, Any]] = {
    "static": {"scale": 0.03}, "inverse": {"scale": 40.0, "inverse": True}, "per token": {"floor": 1e-9},
    "per block": {"floor": 1e-9, "group": 128}, "other constants": {"limit": 240.0, "divisor": 240.0, "floor": 0.5},
}  # fmt: skip


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    x = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)
    if len(shape) > 1 and shape[0] > 2:
        x[0], x[1, ..., 0] = 0, float("nan")
        x[2] *= 1000
    return x.cuda()


def compare(have: Tensor, want: Tensor, noise: Tensor | float = 0.0) -> None:
    """NaN where it should be, at most one step of FP8 away, and that for few.

    Args:
        noise: what rounding before the last step may have made of it besides.
    """
    assert (have.dtype, have.shape) == (want.dtype, want.shape)
    a, b = have.float(), want.float()
    assert bool((a.isnan() == b.isnan()).all())
    error = (((a - b).abs() - noise).clamp(min=0) / b.abs().clamp(min=2.0**-6)).nan_to_num(0)
    if error.numel() and have.dtype == torch.float8_e4m3fn:
        assert float(error.max()) <= 0.126
        assert float((error > 0).float().mean()) <= 0.02
    elif error.numel():
        assert float(error.max()) <= (1e-5 if have.dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantising_kernels(shape: tuple[int, ...], dtype: torch.dtype, how: str) -> None:
    from fxc.ops import fp8_triton

    options = dict(HOW[how])
    if shape[-1] % options.get("group", 1):
        pytest.skip("no blocks of 128 in such a row")
    scale = torch.tensor(options.pop("scale"), device="cuda") if "scale" in options else None
    x, other, weight = made(shape, dtype, 0), made(shape, dtype, 1), made(shape[-1:], torch.float32, 2).to(dtype)
    weight = weight.nan_to_num(1.0)
    for residual, scales, offset in ((other, weight, 1.0), (None, None, 0.0)):
        args, named = (x, residual, scales, scale), {"eps": 1e-5, "offset": offset, **options}
        for have, want in zip(fp8_triton.norm(*args, **named), norm_reference(*args, **named), strict=True):
            compare(have, want)
    gate, up = torch.cat([x, other], -1).chunk(2, -1)
    for activation in range(3):
        found = fp8_triton.gated(gate, up, scale, activation=activation, **options)
        expected = gated_reference(gate, up, scale, activation=activation, **options)
        noise: Tensor | float = 0.0
        if scale is not None:  # tails of GELU are differences of numbers near 1: the last bit of those, times the rest
            noise = 2.0**-23 * (gate.float() * up.float()).abs() * (scale if options.get("inverse") else 1 / scale)
        for index, (have, want) in enumerate(zip(found, expected, strict=True)):
            compare(have, want, 0.0 if index else noise)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary", [128, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rope_kernel(dtype: torch.dtype, rotary: int, interleaved: bool) -> None:
    from fxc.ops import rope_triton

    qkv = torch.randn(37, 48, 128, device="cuda").to(dtype)
    q, k, weights = qkv[:, :32], qkv[:, 32:40], [qkv[0, 0], qkv[1, 1]]
    for width in (rotary // 2, rotary):
        cos, sin = torch.randn(2, 37, 1, width, device="cuda")
        for x, given, norm in (((q, k), weights, True), ((q,), [], False)):
            options: dict[str, Any] = {"rotary": rotary, "interleaved": interleaved, "norm": norm, "eps": 1e-5}
            found = rope_triton.norm_rope(x, given, cos, sin, **options)
            for have, want in zip(found, reference(x, given, cos, sin, **options), strict=True):
                torch.testing.assert_close(have, want, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "per token"])
def test_a_model_in_fp8(dynamic: bool, tmp_path: Path) -> None:
    """Its fusions are found, and it equals the model within FP8."""
    sys.path.insert(0, str(EXAMPLE.parent))
    from fp8_llama import FP8Llama
    from tiny_llama import TinyLlama

    overrides = ["device=cuda", "model.args.layers=2", f"model.args.dynamic={dynamic}", "compile.sizes=[8]"]
    result = fxc.build(EXAMPLE, overrides=overrides, cache_dir=tmp_path)
    assert {entry.name: entry.matches for entry in result.passes}["norm_quant"] == 4
    shape = {"layers": 2, "hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 512, "vocab": 1024}
    torch.manual_seed(0)
    model = FP8Llama(dynamic=dynamic, **shape).load(TinyLlama(**shape)).eval().requires_grad_(False).cuda()
    program = fxc.load(result.hash, device="cuda", cache_dir=tmp_path).bind(model)
    for n in (1, 8, 37, 500):
        ids, positions = torch.randint(1024, (n,)).cuda(), torch.arange(n).cuda()
        errors = row_errors(program(input_ids=ids, positions=positions), model(ids, positions))
        assert float(errors.max()) < 0.1
    program.capture(sizes=[8])
    ids, positions = torch.randint(1024, (8,)).cuda(), torch.arange(8).cuda()
    assert float(row_errors(program(input_ids=ids, positions=positions), model(ids, positions)).max()) < 0.1


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary", [128, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rope_and_write_kernel(dtype: torch.dtype, rotary: int, interleaved: bool) -> None:
    from fxc.ops import rope_triton
    from fxc.ops.rope_write import reference as write_reference

    qkv = torch.randn(37, 48, 128, device="cuda").to(dtype)
    q, k, v, weights = qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], [qkv[0, 0], qkv[1, 1]]
    slots = torch.randperm(9 * 16, device="cuda")[:37]
    slots[::5] = -1
    cos, sin = torch.randn(2, 37, 1, rotary // 2, device="cuda")
    for x, given, norm in (((q, k), weights, True), ((q, k), [], False), ((k,), [], False)):
        options: dict[str, Any] = {"rotary": rotary, "interleaved": interleaved, "norm": norm, "eps": 1e-5}
        caches = [torch.zeros(9, 16, 8, 128, device="cuda", dtype=dtype) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        have = rope_triton.norm_rope_write(x, v, given, cos, sin, *caches, slots, **options)
        want = write_reference(x, v, given, cos, sin, expected[0], expected[1], slots, **options)
        for a, b in zip([*have, *caches], [*want, *expected], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("inverse", [False, True], ids=["scale", "inverse"])
@pytest.mark.parametrize("case", [MIXED, DECODE, ONE], ids=["mixed", "decode", "one"])
def test_attention_that_writes_fp8(case: tuple[list[int], list[int]], inverse: bool) -> None:
    from fxc.ops import paged_attention
    from fxc.ops.paged import reference as attention_reference

    args = [tensor.cuda() for tensor in batch(*case, width=64, dtype=torch.bfloat16, pad=3)]
    factor = torch.tensor(100.0 if inverse else 0.01, device="cuda")
    have = paged_attention(*args, None, factor, output_inverse=inverse)
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in args]
    want = (attention_reference(*wide) / 0.01).clamp(-448, 448)
    assert have.dtype == torch.float8_e4m3fn
    # Half a step of FP8, and what the kernel's bfloat16 weights are off by, which is as large for small results.
    allowed = want.abs() * 2.0**-4 + 2.0**-10 + 0.01 * want.square().mean(-1, keepdim=True).sqrt()
    assert bool(((have.double() - want).abs() <= allowed).all())
