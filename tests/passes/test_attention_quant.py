"""Attention that writes FP8: the whole graph before it is cut, its numbers, and what only looks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fxc.graph_run import run as run_graph
from fxc.graph_text import print_graph
from fxc.ops import kv_write, paged_attention
from fxc.partition import partition
from fxc.passes.attention_quant import AttentionQuant
from fxc.rewrite import Found
from fxc.traced import Traced
from tests.building import target
from tests.ops.paged_cases import DECODE, MIXED, batch
from tests.passes.pieces import traced

FP8 = torch.float8_e4m3fn
SHAPES = {
    "q": "bfloat16[n, 4, 16]", "k": "bfloat16[n, 2, 16]", "v": "bfloat16[n, 2, 16]", "k_cache": "bfloat16[15, 16, 2, 16]",
    "v_cache": "bfloat16[15, 16, 2, 16]", "slots": "int64[n]", "table": "int32[7, 5]", "lengths": "int32[7]",
    "starts": "int32[8]", "scale": "float32[]",
}  # fmt: skip
Quantise = Callable[[Tensor, Tensor], Tensor]


def attends(quantise: Quantise, **options: Any) -> Callable[..., Any]:
    """A layer's middle: keys and values are written, attention reads them, its result is quantised and used."""

    def function(
        q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, table: Tensor,
        lengths: Tensor, starts: Tensor, scale: Tensor,
    ) -> Tensor:  # fmt: skip
        kv_write(k, v, k_cache, v_cache, slots)
        mixed = paged_attention(q * 2, k_cache, v_cache, table, lengths, starts, **options)
        return quantise(mixed, scale).float() * scale

    return function


def static(y: Tensor, scale: Tensor) -> Tensor:
    return (y.flatten(1).float() / scale).clamp(-448, 448).to(FP8)


def inverse(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() * scale).clamp(-448, 448).to(FP8).reshape(y.shape[0], -1)


def as_transformers_do(y: Tensor, scale: Tensor) -> Tensor:
    rows = y[None].reshape(1, y.shape[0], -1).contiguous()
    return (rows.float() / scale).clamp(-448, 448).to(FP8)[0]


def whole(function: Callable[..., Any], shapes: Mapping[str, str] = SHAPES) -> tuple[Traced, Found, Traced]:
    before = traced(function, shapes)
    found = Found([AttentionQuant()], target(), 2)
    return before, found, found.whole(before, "step_0")


def grown(tensor: Tensor, size: int) -> Tensor:
    """With zeros behind it."""
    return torch.cat([tensor, tensor.new_zeros(size - len(tensor), *tensor.shape[1:])])


def arguments(case: tuple[list[int], list[int]], scale: float) -> dict[tuple[str, str], Tensor]:
    q, k_cache, v_cache, table, lengths, starts = batch(*case, dtype=torch.bfloat16)
    q = torch.cat([q, q[:3]])  # tokens of no request
    k_cache, v_cache = (grown(cache.nan_to_num(0), 15) for cache in (k_cache, v_cache))
    table, lengths = grown(grown(table, 7).mT, 5).mT.contiguous(), grown(lengths, 7)
    starts = torch.cat([starts, starts[-1].expand(8 - len(starts))])
    new = torch.randn(2, q.shape[0], 2, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    slots = torch.full((q.shape[0],), -1)
    values = (q, *new, k_cache, v_cache, slots, table, lengths, starts, torch.tensor(scale))
    return {("input", name): value for name, value in zip(SHAPES, values, strict=True)}


@pytest.mark.parametrize("quantise", [static, inverse, as_transformers_do])
@pytest.mark.parametrize("options", [{}, {"window": 7, "scale": 0.3}], ids=str)
def test_numbers(quantise: Quantise, options: dict[str, Any]) -> None:
    """Ragged, one token each, too large for FP8, NaN, and tokens of no request."""
    before, found, after = whole(attends(quantise, **options))
    (report,) = found.reports()
    assert (report.matches, report.sites[0].piece) == (1, "step_0")
    text = print_graph(after.graph, "f")
    assert "clamp" not in text
    assert ("output_inverse=True" in text) == (quantise is inverse)
    scales = (20.0, 1e6) if quantise is inverse else (0.05, 1e-5)
    for case, scale in ((MIXED, scales[0]), (DECODE, scales[0]), (DECODE, scales[1])):
        given = arguments(case, scale)
        if case is DECODE:
            given["input", "v_cache"][int(given["input", "table"][1, 0]), 15, 0] = float("nan")  # seen by one request
        tokens = given["input", "q"].shape[0]
        have, _ = run_graph(after, given, {"n": tokens}, "cpu")
        want, _ = run_graph(before, given, {"n": tokens}, "cpu")
        a, b = have[0] / scale, want[0] / scale
        assert bool((a.isnan() == b.isnan()).all())
        assert bool(a.isnan().any()) == (case is DECODE)
        error = ((a - b).abs() / b.abs().clamp(min=2.0**-6)).nan_to_num(0)
        assert float(error.max()) <= 0.126
        assert float((error > 1e-6).float().mean()) < 0.1
        assert not a[-3:].any()
        assert scale != scales[1] or float(a.nan_to_num(0).abs().max()) == pytest.approx(448)


def test_golden(golden: Callable[[str, str], None]) -> None:
    before, _, after = whole(attends(static))
    golden("pass_attention_quant.txt", "\n\n".join(print_graph(t.graph, "step") for t in (before, after)))


def test_the_graph_that_was_traced_is_kept() -> None:
    before, _, after = whole(attends(static))
    assert after.original is before
    assert "aten.clamp" in print_graph(before.graph, "f")
    assert after.graph is not before.graph
    assert after.mutated == before.mutated


def test_it_is_cut_as_the_other_graph_is() -> None:
    """What is written stays written, and the next piece begins with FP8."""
    for graph, kind in zip(whole(attends(static))[::2], ("bf16", "f8e4m3fn"), strict=True):
        first, attention, last = partition(graph, ("fxc::attention",)).statements
        assert "fxc.kv_write" in first.piece.text
        assert attention.node.target is paged_attention
        assert f'in_0: "{kind}[n, 4, 16]"' in last.piece.text


def test_results_may_be_what_is_replaced() -> None:
    def function(*args: Tensor) -> Any:
        return {"mixed": static(paged_attention(*args[:6]), args[6]), "n": None}

    names = ("q", "k_cache", "v_cache", "table", "lengths", "starts", "scale")

    def named(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, starts: Tensor, scale: Tensor
    ) -> Any:
        return function(q, k_cache, v_cache, table, lengths, starts, scale)

    _, _, after = whole(named, {name: SHAPES[name] for name in names})
    assert after.output["mixed"] in after.graph.nodes
    assert after.output["n"] is None
    (output,) = after.graph.find_nodes(op="output")
    assert after.output["mixed"] is output.args[0][0]


def per_token(y: Tensor, scale: Tensor) -> Tensor:
    y = y.flatten(1).float()
    top = (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (y / top).clamp(-448, 448).to(FP8)


def used_twice(y: Tensor, scale: Tensor) -> Tensor:
    return static(y, scale).float() + y.flatten(1)


OTHERWISE: dict[str, tuple[Quantise, str]] = {
    "per token": (per_token, "is a scale for each row, the kernel takes one for all"),
    "not clamped": (lambda y, s: (y.float() / s).to(FP8), "is aten::div, expected aten::clamp"),
    "clamped to less": (lambda y, s: (y.float() / s).clamp(-240, 240).to(FP8), "clamps to -240..240, expected -448..448"),
    "e5m2": (lambda y, s: (y.float() / s).clamp(-448, 448).to(torch.float8_e5m2), "has torch.float8_e5m2 where"),
    "used again": (used_twice, "its value is used by"),
    "a sum": (lambda y, s: static(y + 1, s), "is aten::add"),
    "a scale for each column": (lambda y, s: static(y, s.expand(64)), "is f32[64]"),
    "scaled in bfloat16": (lambda y, s: (y / s.bfloat16()).clamp(-448, 448).to(FP8), "bf16[], expected one f32 as scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_only_looks_alike(name: str) -> None:
    quantise, reason = OTHERWISE[name]
    before, found, after = whole(attends(quantise))
    assert after is before
    (report,) = found.reports()
    assert report.missed
    (miss,) = report.sites[0].near_misses
    assert reason in miss.reason


def test_a_scale_that_is_not_there_yet() -> None:
    _, found, _ = whole(attends(lambda y, s: static(y, (s * 2).reshape(()))))
    assert found.reports()[0].sites[0].near_misses[0].reason.startswith("is not there yet where attention")


def test_stateless_attention_has_no_such_kernel_and_is_left_alone() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return static(torch.ops.fxc.attention(q, k, v), scale)

    before, found, after = whole(function, {name: SHAPES[name] for name in ("q", "k", "v", "scale")})
    assert after is before
    assert not found.reports()[0].sites
