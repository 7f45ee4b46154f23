"""The kernels of the paged ops on a GPU, against what the CPU computes in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxc.ops import kv_write, paged_attention, paged_attention_out
from tests.ops.paged_cases import batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIXED = ([5, 1, 0, 3, 1, 200, 1, 4], [20, 400, 0, 3, 33, 700, 0, 90])
DECODE = ([1] * 5 + [0] * 3, [1, 17, 300, 0, 1000, 0, 0, 0])
ONE = ([90], [300])
BATCHES = {"mixed": MIXED, "decode": DECODE, "one": ONE}
OPTIONS: list[dict[str, Any]] = [{}, {"window": 100}, {"chunk": 64, "softcap": 5.0, "scale": 0.2}]
SHAPES = [
    # heads, key/value heads, width, width of values, type, tolerance
    (8, 2, 64, 64, torch.float16, 2e-3),
    (4, 4, 96, 96, torch.bfloat16, 1e-2),
    (8, 2, 128, 128, torch.bfloat16, 1e-2),
    (4, 2, 256, 256, torch.bfloat16, 1e-2),
    (14, 2, 128, 64, torch.bfloat16, 1e-2),
    (64, 1, 64, 64, torch.bfloat16, 1e-2),
    (4, 2, 128, 128, torch.float32, 1e-5),
]


def right(args: tuple[Tensor, ...], sinks: Tensor | None = None, **options: Any) -> Tensor:
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in args]
    return paged_attention(*wide, None if sinks is None else sinks.double(), **options)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_cpu(shape: tuple[Any, ...], name: str, options: dict[str, Any]) -> None:
    heads, kv_heads, width, value_width, dtype, tolerance = shape
    args = batch(
        *BATCHES[name], heads=heads, kv_heads=kv_heads, width=width, value_width=value_width, dtype=dtype, pad=3
    )
    sinks = torch.linspace(-1, 2, heads) if "window" in options else None
    expected = right(args, sinks, **options)
    out = torch.full(expected.shape, float("nan"), dtype=dtype, device="cuda")
    given = [None if tensor is None else tensor.cuda() for tensor in (*args, sinks)]
    paged_attention_out(*given, **options, out=out)
    assert error(out, expected) < tolerance
    assert not out[int(args[-1][-1]) :].any()


@pytest.mark.parametrize("block_size", [1, 32])
@pytest.mark.parametrize("name", ["mixed", "decode"])
def test_block_sizes(name: str, block_size: int) -> None:
    args = batch(*BATCHES[name], width=64, dtype=torch.bfloat16, block_size=block_size)
    assert error(paged_attention(*(tensor.cuda() for tensor in args)), right(args)) < 1e-2


def test_one_captured_graph_serves_every_content() -> None:
    contents = [
        ([1] * 8, [1, 17, 300, 40, 1000, 2, 64, 65]),
        ([8, 0, 0, 0, 0, 0, 0, 0], [500, 0, 0, 0, 0, 0, 0, 0]),
        ([1, 1, 1, 0, 0, 0, 0, 0], [900, 5, 33, 0, 0, 0, 0, 0]),
        ([0] * 8, [0] * 8),
    ]
    batches = []
    for new, lengths in contents:
        q, k, v, table, *rest = batch(new, lengths, width=64, dtype=torch.bfloat16, pad=8 - sum(new))
        wide = torch.zeros(8, 64, dtype=torch.int32)
        wide[:, : table.shape[1]] = table
        room = torch.full((160, 16, 2, 64), float("nan"), dtype=torch.bfloat16)
        caches = [torch.cat((cache, room[cache.shape[0] :])) for cache in (k, v)]
        batches.append((q, *caches, wide, *rest))
    static = [tensor.cuda() for tensor in batches[-1]]
    paged_attention(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*static)
    for args in batches:
        for place, tensor in zip(static, args, strict=True):
            place.copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        expected = right(args)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=2e-2)


def test_caches_of_more_than_two_to_the_31_elements() -> None:
    blocks = (1 << 31) // (16 * 8 * 128) + 64
    k_cache, v_cache = (torch.empty(blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q, k, v = (torch.randn(40, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
    table = torch.tensor([[blocks - 1, 0, blocks - 2]], dtype=torch.int32, device="cuda")
    at = torch.arange(40, device="cuda")
    kv_write(k, v, k_cache, v_cache, table[0, at // 16].long() * 16 + at % 16)
    lengths, starts = torch.tensor([40]).int(), torch.tensor([0, 40]).int()
    out = paged_attention(q, k_cache, v_cache, table, lengths.cuda(), starts.cuda())
    few = [torch.cat((tensor, tensor.new_zeros(8, 8, 128))).view(3, 16, 8, 128).cpu() for tensor in (k, v)]
    expected = right((q.cpu(), *few, torch.tensor([[0, 1, 2]]).int(), lengths, starts))
    assert error(out, expected) < 1e-2


def test_kv_write() -> None:
    k, v = torch.randn(7, 3, 128).bfloat16(), torch.randn(7, 3, 64).bfloat16()
    caches = [torch.zeros(5, 16, 3, 128).bfloat16(), torch.zeros(5, 16, 3, 64).bfloat16()]
    slots = torch.tensor([3, -1, 79, 20, -1, 0, 41])
    found = [cache.cuda() for cache in caches]
    kv_write(k.cuda(), v.cuda(), *found, slots.cuda())
    kv_write(k, v, *caches, slots)
    assert torch.equal(found[0].cpu(), caches[0])
    assert torch.equal(found[1].cpu(), caches[1])
