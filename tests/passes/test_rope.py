"""Rotary embedding and the norm of heads before it: the forms that models have, their numbers, and look-alikes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxc.prove import row_errors, strides
from tests.passes.pieces import alone, execute, inputs, outcome, piece, reasons

Function = Callable[..., Any]
D, HEADS = 32, 4


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tables half as wide."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def halves_in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide[..., : wide.shape[-1] // 2], wide[..., wide.shape[-1] // 2 :]
    return torch.cat((cos * first - sin * second, sin * first + cos * second), dim=-1).type_as(x)


def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tables as wide as what is turned."""
    half = x.shape[-1] // 2
    return (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin).to(x.dtype)


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


def neighbours_whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A table has an entry for each element here, too."""
    crossed = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return (x * cos + crossed * sin).to(x.dtype)


FORMS: dict[str, tuple[Function, int]] = {
    "halves": (halves, 2), "halves in float32": (halves_in_float32, 2), "whole": (whole, 1), "neighbours": (neighbours, 2),
    "neighbours whole": (neighbours_whole, 1),
}  # fmt: skip
"""With what the width of a table is a part of."""


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def normed_one_more(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())).to(x.dtype)


NORMS: dict[str, Function] = {"plain": lambda x, weight: x, "norm": normed, "1 + weight": normed_one_more}


def both(turn: Function, norm: Function, rotary: int = D, heads_first: bool = False) -> Function:
    """Queries and keys of one matrix, as models have them."""

    def one(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = norm(x, weight)
        x = x.transpose(-3, -2) if heads_first else x
        if rotary == D:
            return turn(x, cos, sin)
        return torch.cat([turn(x[..., :rotary], cos, sin), x[..., rotary:]], -1)

    def function(x: Tensor, cos: Tensor, sin: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = x.split([HEADS, 2, 2], -2)
        axis = -3 if heads_first else -2
        cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
        return one(q, a, cos, sin), one(k, b, cos, sin), v * 2

    return function


def shapes(
    part: int, rotary: int = D, dtype: str = "bfloat16", tables: str = "float32", batch: str = ""
) -> dict[str, str]:
    table = f"{tables}[{batch}n, {rotary // part}]"
    weights = {"a": f"{dtype}[{D}]", "b": f"{dtype}[{D}]"}
    return {"x": f"{dtype}[{batch}n, {HEADS + 4}, {D}]", "cos": table, "sin": table, **weights}


def check_fused(text: str, *words: str) -> None:
    """Queries and keys are one call, and it computes the same."""
    ran = alone(text, "norm_rope")
    assert len(outcome(ran, "norm_rope").matches) == 2, reasons(ran, "norm_rope")
    assert ran.text.count("torch.ops.fxc.norm_rope.") == 1
    for word in words:
        assert word in ran.text
    for n in (1, 3):
        given = inputs(text, {"n": n})
        for have, want in zip(execute(ran.text, given), execute(text, given), strict=True):
            assert (have.dtype, have.shape, strides(have)) == (want.dtype, want.shape, strides(want))
            assert float(row_errors(have, want).max()) < (2e-2 if want.dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("batch", ["", "2, "], ids=["flat", "batch"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, norm: str, batch: str) -> None:
    turn, part = FORMS[form]
    text = piece(both(turn, NORMS[norm]), shapes(part, batch=batch))
    words = [f"rotary={D}", f"interleaved={form.startswith('neighbours')}"]
    if norm != "plain":
        words += ["norm=True", "eps=1e-06", f"offset={float(norm == '1 + weight')}"]
    check_fused(text, *words)


@pytest.mark.parametrize("norm", ["plain", "norm"])
@pytest.mark.parametrize("form", FORMS)
def test_partly_turned(form: str, norm: str) -> None:
    turn, part = FORMS[form]
    check_fused(piece(both(turn, NORMS[norm], rotary=16), shapes(part, 16)), "rotary=16")


@pytest.mark.parametrize("norm", ["plain", "norm"])
def test_heads_before_tokens(norm: str) -> None:
    """As in models of transformers: memory stays token by token."""
    check_fused(piece(both(whole, NORMS[norm], heads_first=True), shapes(1, batch="1, ")), "transpose.int")


def test_tables_and_heads_in_another_order_than_usual() -> None:
    """Heads and tokens swapped, and a table with a row for each head, the same for all tokens."""

    def function(x: Tensor, cos: Tensor, sin: Tensor, a: Tensor) -> Tensor:
        return halves(normed(x, a).transpose(-3, -2), cos, sin)

    given = {"x": f"float32[n, 4, {D}]", "cos": f"float32[4, 1, {D // 2}]", "sin": f"float32[4, 1, {D // 2}]"}
    text = piece(function, {**given, "a": f"float32[{D}]"})
    ran = alone(text, "norm_rope")
    assert ran.text == alone(text, "noop").text
    assert reasons(ran, "norm_rope")[0].endswith("expected a fixed number of heads")


@pytest.mark.parametrize("tables", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype: str, tables: str) -> None:
    text = piece(both(halves_in_float32, normed), shapes(2, dtype=dtype, tables=tables))
    check_fused(text)


def test_golden(golden: Callable[[str, str], None]) -> None:
    text = piece(both(halves, normed), shapes(2))
    golden("pass_norm_rope.txt", f"{text}\n\n{alone(text, 'norm_rope').text}")


def test_with_tables_of_their_own_they_are_two_calls() -> None:
    def function(x: Tensor, cos: Tensor, sin: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        q, k = x.split([HEADS, 4], 1)
        return halves(q, cos.unsqueeze(1), sin.unsqueeze(1)), halves(k, more.unsqueeze(1), sin.unsqueeze(1))

    given = shapes(2)
    text = piece(function, {**{name: given[name] for name in ("x", "cos", "sin")}, "more": given["cos"]})
    ran = alone(text, "norm_rope")
    assert ran.text.count("torch.ops.fxc.norm_rope.") == 2


def added(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos + second * sin, second * cos + first * sin], -1).to(x.dtype)


def crossed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * cos + second * sin], -1).to(x.dtype)


def behind_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([second * cos + first * sin, first * cos - second * sin], -1).to(x.dtype)


def not_negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
    return (x * cos + torch.cat((x[..., 16:], x[..., :16]), -1) * sin).to(x.dtype)


def put_apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours turned, but stored as halves."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - 0.5 * (second * sin), second * cos + first * sin], -1).to(x.dtype)


OTHERWISE: dict[str, tuple[Function, str]] = {
    "a sum in both": (added, "expected"),
    "the first half twice": (crossed, "expected"),
    "halves the other way round": (behind_first, "expected"),
    "no minus": (not_negated, "is aten::slice, expected aten::neg"),
    "neighbours stored as halves": (put_apart, "has"),
    "scaled": (scaled, "expected"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_only_looks_alike(name: str) -> None:
    turn, reason = OTHERWISE[name]
    text = alone(piece(both(turn, NORMS["plain"]), shapes(2)), "noop").text
    ran = alone(text, "norm_rope")
    assert ran.text == text
    assert [reason in found for found in reasons(ran, "norm_rope")] == [True, True], reasons(ran, "norm_rope")


def test_tables_for_each_head() -> None:
    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return halves(x, cos, sin)

    text = piece(
        function, {"x": f"float32[n, 4, {D}]", "cos": f"float32[n, 4, {D // 2}]", "sin": f"float32[n, 4, {D // 2}]"}
    )
    (reason,) = reasons(alone(text, "norm_rope"), "norm_rope")
    assert "expected a row for each token, for all heads" in reason


def test_unequal_halves() -> None:
    """The table would have to be as wide as both."""

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., :8], x[..., 8:16]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 16:]], -1)

    text = piece(function, {"x": f"float32[n, 4, {D}]", "cos": "float32[n, 1, 8]", "sin": "float32[n, 1, 8]"})
    assert alone(text, "norm_rope").text == alone(text, "noop").text


def test_a_normed_head_that_is_used_elsewhere() -> None:
    """Then the rotation alone is fused."""

    def function(x: Tensor, cos: Tensor, sin: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        x = normed(x, a)
        return halves(x, cos.unsqueeze(1), sin.unsqueeze(1)), x

    given = shapes(2)
    text = piece(function, {name: given[name] for name in ("x", "cos", "sin", "a")})
    ran = alone(text, "norm_rope")
    assert ran.text.count("torch.ops.fxc.norm_rope.") == 1
    assert "norm=True" not in ran.text
    assert "rsqrt" in ran.text
