"""Runs the kernels of `fxc.ops.fp8` and `fxc.ops.rope` under Triton's interpreter and compares them with the references.

The interpreter rounds to FP8 and bfloat16 in a way of its own, so the kernels write what they would round as float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxc.ops import fp8_triton, rope_triton
from fxc.ops.fp8 import gated_reference, norm_reference
from fxc.ops.paged_triton import run
from fxc.ops.rope import reference
from fxc.ops.rope_write import reference as write_reference

SCALE = torch.tensor(0.002)
HOW: tuple[tuple[Tensor | None, dict[str, Any]], ...] = (
    (SCALE, {}),
    (SCALE, {"inverse": True}),
    (None, {"floor": 1e-9}),
    (None, {"floor": 0.0, "limit": 240.0, "divisor": 240.0}),
    (None, {"floor": 1e-9, "group": 128}),
)


def wide(launch: Any, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    """What a launch gives, its first result rounded here."""
    kept: list[Tensor] = []

    def call(kernel: Any, grid: tuple[Any, ...], *given: Any, **constants: Any) -> None:
        tensors = list(given)
        (index,) = [i for i, t in enumerate(tensors) if isinstance(t, Tensor) and t.dtype == torch.float8_e4m3fn]
        tensors[index] = torch.full(tensors[index].shape, 7.0)
        kept.append(tensors[index])
        run(kernel, grid, *tensors, **constants)

    _, *more = launch(*args, call=call, **options)
    return kept[0].to(torch.float8_e4m3fn), *more


def compare(have: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(have, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = a.float(), b.float()
        assert bool((a.isnan() == b.isnan()).all())
        error = ((a - b).abs() / b.abs().clamp(min=2.0**-6)).nan_to_num(0)
        assert float(error.max() if error.numel() else 0) <= (0.126 if index == 0 else 1e-6)
        assert float((error > 1e-6).float().mean() if error.numel() else 0) <= 0.01


def rows(count: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = (4 * torch.randn(count, width, generator=torch.Generator().manual_seed(width))).to(dtype)
    if count > 2:
        x[0], x[1, 0] = 0, float("nan")
    return x, x.flip(0)


def turned() -> None:
    """Queries and keys, of slices, in all forms."""
    qkv = torch.randn(3, 8, 48, generator=torch.Generator().manual_seed(1))
    q, k, weights = qkv[:, :5], qkv[:, 5:7], [qkv[0, 0], qkv[1, 1]]
    for interleaved, full, rotary in ((False, False, 48), (True, True, 48), (False, True, 32), (True, False, 16)):
        cos, sin = torch.randn(2, 3, 1, rotary if full else rotary // 2, generator=torch.Generator().manual_seed(2))
        for x, given, norm in (
            ((q, k), weights, True),
            ((q, k), [], True),
            ((q,), weights[:1], True),
            ((q,), [], False),
        ):
            options: dict[str, Any] = {"rotary": rotary, "interleaved": interleaved, "norm": norm, "eps": 1e-5}
            have = rope_triton.norm_rope(x, given, cos, sin, offset=1.0, **options)
            for a, b in zip(have, reference(x, given, cos, sin, offset=1.0, **options), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def turned_and_written() -> None:
    """The same into a cache, with pad rows, values of another width, and keys alone."""
    qkv = torch.randn(4, 9, 24, generator=torch.Generator().manual_seed(1))
    q, k, v, slots = qkv[:, :5], qkv[:, 5:7], qkv[:, 7:9, :20], torch.tensor([11, -1, 0, 6])
    for interleaved, full, rotary in ((False, False, 24), (True, True, 24), (False, True, 16), (True, False, 8)):
        cos, sin = torch.randn(2, 4, 1, rotary if full else rotary // 2, generator=torch.Generator().manual_seed(2))
        for x, weights, norm in (
            ((q, k), [qkv[0, 0], qkv[1, 1]], True),
            ((q, k), [], False),
            ((k,), [qkv[1, 1]], True),
        ):
            options: dict[str, Any] = {"rotary": rotary, "interleaved": interleaved, "norm": norm, "eps": 1e-5}
            caches = [torch.zeros(3, 4, 2, 24), torch.zeros(3, 4, 2, 20)]
            expected = [cache.clone() for cache in caches]
            have = rope_triton.norm_rope_write(x, v, weights, cos, sin, *caches, slots, **options)
            want = write_reference(x, v, weights, cos, sin, expected[0], expected[1], slots, **options)
            for a, b in zip([*have, *caches], [*want, *expected], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def many_heads() -> None:
    """More heads than one program has, of which the last chunk is not full."""
    qkv = torch.randn(2, 67, 8, generator=torch.Generator().manual_seed(1))
    q, k, v, slots = qkv[:, :33], qkv[:, 33:50], qkv[:, 50:], torch.tensor([5, -1])
    cos, sin = torch.randn(2, 2, 1, 4, generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"rotary": 8, "norm": True, "eps": 1e-5}
    have, want = rope_triton.norm_rope((q, k), [], cos, sin, **options), reference((q, k), [], cos, sin, **options)
    for x in ((q, k), (k,)):
        caches, expected = ([torch.zeros(2, 4, 17, 8) for _ in range(2)] for _ in range(2))
        have += [*rope_triton.norm_rope_write(x, v, [], cos, sin, *caches, slots, **options), *caches]
        want = [*want, *write_reference(x, v, [], cos, sin, expected[0], expected[1], slots, **options), *expected]
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def parts_of_rows() -> None:
    """Rows of more than one part, the last not full, and of whole groups."""
    for width, scale, options in ((1025, SCALE, {}), (2560, None, {"floor": 1e-9, "group": 128})):
        gate, up = rows(2, width, torch.float32)
        compare(wide(fp8_triton.gated, gate, up, scale, **options), gated_reference(gate, up, scale, **options))


if __name__ == "__main__":
    turned()
    turned_and_written()
    many_heads()
    parts_of_rows()
    for count, width, dtype in ((3, 100, torch.float32), (1, 1, torch.float32), (5, 384, torch.float16)):
        x, other = rows(count, width, dtype)
        both = torch.cat([x, other], -1)
        gate, up = both.chunk(2, -1)
        for scale, options in HOW:
            if width % options.get("group", 1):
                continue
            for residual, weight in ((None, None), (other, other[0])):
                args = (x, residual, weight, scale)
                named = {"eps": 1e-5, "offset": 1.0, **options}
                compare(wide(fp8_triton.norm, *args, **named), norm_reference(*args, **named))
            for activation in range(3):
                found = wide(fp8_triton.gated, gate, up, scale, activation=activation, **options)
                compare(found, gated_reference(gate, up, scale, activation=activation, **options))
    print("equal")
