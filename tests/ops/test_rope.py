"""`fxc::norm_rope` against complex numbers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxc.ops.rope import norm_rope

D = 32
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def right(x: Tensor, angle: Tensor, rotary: int, interleaved: bool) -> Tensor:
    """Pairs as complex numbers, times e**(i angle)."""
    front = x[..., :rotary].double()
    pairs = front.unflatten(-1, (-1, 2)) if interleaved else torch.stack(front.chunk(2, -1), -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    parts = torch.view_as_real(turned)
    back = parts.flatten(-2) if interleaved else torch.cat([parts[..., 0], parts[..., 1]], -1)
    return torch.cat([back, x[..., rotary:].double()], -1)


@pytest.mark.parametrize("full", [False, True], ids=["half tables", "full tables"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary", [32, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(5,), (1,), (2, 3)], ids=str)
def test_numbers(lead: tuple[int, ...], dtype: torch.dtype, rotary: int, interleaved: bool, full: bool) -> None:
    angle = 3 * made(*lead, 1, rotary // 2, seed=9).double()
    tables = [angle.cos().float(), angle.sin().float()]
    if full:
        tables = [t.repeat_interleave(2, -1) if interleaved else torch.cat([t, t], -1) for t in tables]
    q, k = made(*lead, 4, D).to(dtype), made(*lead, 2, D, seed=1).to(dtype)
    weights = [made(D, seed=2).to(dtype), made(D, seed=3).to(dtype)]
    options: dict[str, Any] = {"rotary": rotary, "interleaved": interleaved}
    for norm in ({}, {"norm": True, "eps": 1e-5, "offset": 1.0}):
        found = norm_rope([q, k], weights if norm else [], *tables, **options, **norm)
        for have, x, weight in zip(found, (q, k), weights, strict=True):
            wide = x.double()
            if norm:
                wide = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1)
            want = right(wide, angle, rotary, interleaved)
            assert (have.dtype, have.shape, have.is_contiguous()) == (dtype, x.shape, True)
            assert float((have.double() - want).abs().max() / want.abs().max()) < DTYPES[dtype]


def test_of_slices_and_without_weights() -> None:
    qkv, tables = made(3, 8, D), [made(3, 1, D // 2, seed=i) for i in (1, 2)]
    q, k = qkv[:, :4], qkv[:, 4:6]
    found = norm_rope([q, k], [], *tables, rotary=D, norm=True, eps=1e-5)
    again = norm_rope([q.contiguous()], [torch.ones(D)], *tables, rotary=D, norm=True, eps=1e-5)
    torch.testing.assert_close(found[0], again[0])
    assert [
        t.shape for t in norm_rope([q.to("meta"), k.to("meta")], [], *(t.to("meta") for t in tables), rotary=D)
    ] == [
        (3, 4, D),
        (3, 2, D),
    ]
