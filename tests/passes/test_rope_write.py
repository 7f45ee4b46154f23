"""Turned keys and their way into a cache as one op: where, with what numbers, and where not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxc.graph_text import parse_graph
from fxc.ops import kv_write
from fxc.prove import row_errors, strides
from tests.passes.pieces import alone, every, inputs, outcome, piece, reasons
from tests.passes.test_rope import FORMS, HEADS, NORMS, D, Function, halves, normed, shapes, whole

CACHE = {"k_cache": f"bfloat16[9, 16, 2, {D}]", "v_cache": f"bfloat16[9, 16, 2, {D}]", "slots": "int64[n]"}


def written(
    turn: Function, norm: Function, rotary: int = D, heads_first: bool = False, after: Function = lambda k: k
) -> Function:
    """Queries and keys are turned, keys and values written; `after` is what keys are sent through in between."""

    def one(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = norm(x, weight)
        x = x.transpose(0, 1)[None] if heads_first else x
        turned = turn(x, cos, sin) if rotary == D else torch.cat([turn(x[..., :rotary], cos, sin), x[..., rotary:]], -1)
        return turned.transpose(1, 2)[0] if heads_first else turned

    def function(
        x: Tensor, cos: Tensor, sin: Tensor, a: Tensor, b: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q, k, v = x.split([HEADS, 2, 2], -2)
        cos, sin = (t[None, None] if heads_first else t.unsqueeze(1) for t in (cos, sin))
        q, k = one(q, a, cos, sin), one(k, b, cos, sin)
        kv_write(after(k), v, k_cache, v_cache, slots)
        return q

    return function


def given(text: str, n: int) -> list[Tensor]:
    """Made-up inputs, with slots that are all different but for pad rows."""
    found = inputs(text, {"n": n})
    slots = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(n))[:n]
    slots[n // 2 :: 3] = -1
    return [slots if tensor.dtype == torch.int64 else tensor for tensor in found]


def run(text: str, arguments: list[Tensor]) -> list[Tensor]:
    """Results and what all arguments are afterwards."""
    graph, _ = parse_graph(text)
    copies = [tensor.clone() for tensor in arguments]
    with torch.no_grad():
        return [*torch.fx.GraphModule({}, graph)(*copies), *copies]


def check_fused(text: str, *words: str, others: int = 0) -> None:
    """`others`: queries that are turned apart."""
    ran = every(text)
    assert len(outcome(ran, "rope_write").matches) == 1, reasons(ran, "rope_write")
    assert ran.text.count("torch.ops.fxc.norm_rope_write.") == 1
    assert ran.text.count("torch.ops.fxc.") == 1 + others
    for word in words:
        assert word in ran.text
    for n in (1, 3, 37):
        arguments = given(text, n)
        for have, want in zip(run(ran.text, arguments), run(text, arguments), strict=True):
            assert (have.dtype, have.shape, strides(have)) == (want.dtype, want.shape, strides(want))
            assert float(row_errors(have, want).max()) < (2e-2 if want.dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, norm: str) -> None:
    turn, part = FORMS[form]
    check_fused(piece(written(turn, NORMS[norm]), shapes(part) | CACHE), f"interleaved={form.startswith('neighbours')}")


@pytest.mark.parametrize("form", FORMS)
def test_partly_turned(form: str) -> None:
    turn, part = FORMS[form]
    check_fused(piece(written(turn, normed, rotary=16), shapes(part, 16) | CACHE), "rotary=16")


def test_heads_before_tokens() -> None:
    """Queries are seen in another order before keys are there: they are turned apart."""
    check_fused(piece(written(whole, normed, heads_first=True), shapes(1) | CACHE), others=1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtypes(dtype: str) -> None:
    caches = {name: text.replace("bfloat16", dtype) for name, text in CACHE.items()}
    check_fused(piece(written(halves, normed), shapes(2, dtype=dtype) | caches))


def test_tables_that_are_made_ready_for_each_tensor() -> None:
    def function(
        x: Tensor, cos: Tensor, sin: Tensor, a: Tensor, b: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q, k, v = x.split([HEADS, 2, 2], -2)
        q, k = (halves(part, cos.float().unsqueeze(1), sin.float().unsqueeze(1)) for part in (q, k))
        kv_write(k, v, k_cache, v_cache, slots)
        return q

    check_fused(piece(function, shapes(2) | CACHE))


def test_keys_alone() -> None:
    def function(k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> Tensor:
        kv_write(halves(k, cos.unsqueeze(1), sin.unsqueeze(1)), v, a, b, slots)
        return v + 1

    tables = {name: shapes(2)[name] for name in ("cos", "sin")}
    caches = dict(zip("ab", CACHE.values(), strict=False))
    keys = {"k": f"bfloat16[n, 2, {D}]", "v": f"bfloat16[n, 2, {D}]"}
    text = piece(function, {**keys, **tables, **caches, "slots": CACHE["slots"]})
    check_fused(text)
    assert re.search(r"norm_rope_write.default\(\[in_\d\], in_\d, \[\]", every(text).text)


def test_golden(golden: Callable[[str, str], None]) -> None:
    text = piece(written(halves, normed), shapes(2) | CACHE)
    golden("pass_rope_write.txt", f"{text}\n\n{every(text).text}")


def test_numbers_out_of_the_ordinary() -> None:
    """NaN stays NaN, in its own row; a row of zeros stays zero; pad rows write nothing."""
    text = piece(written(halves, normed), shapes(2) | CACHE)
    arguments = given(text, 4)
    arguments[0][0], arguments[0][1] = 0, float("nan")
    arguments[5].zero_(), arguments[6].zero_()
    arguments[7] = torch.tensor([3, 20, -1, 143])
    q, *after = run(every(text).text, arguments)
    keys, values = after[5].flatten(0, 1), after[6].flatten(0, 1)
    assert not q[0].any()
    assert not keys[3].any()
    assert not values[3].any()
    assert bool(q[1].isnan().all())
    assert bool(keys[20].isnan().all())
    assert bool(q[2:].isfinite().all())
    assert torch.equal(values[143], arguments[0][3, HEADS + 2 :])
    rest = [slot for slot in range(9 * 16) if slot not in (3, 20, 143)]
    assert not keys[rest].any()
    assert not values[rest].any()


def copied(k: Tensor) -> Tensor:
    return k.transpose(0, 1).contiguous().transpose(0, 1)


OTHERWISE: dict[str, tuple[Function, str]] = {
    "scaled on the way": (lambda k: k * 0.5, "is aten::mul, expected fxc::norm_rope"),
    "laid out otherwise": (copied, "is aten::contiguous, expected fxc::norm_rope"),
    "the heads in another order": (lambda k: k.flip(1), "is aten::flip, expected fxc::norm_rope"),
    "only some heads": (lambda k: torch.cat([k[:, :1], k[:, :1]], 1), "is aten::cat, expected fxc::norm_rope"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_only_looks_alike(name: str) -> None:
    after, reason = OTHERWISE[name]
    text = piece(written(halves, normed, after=after), shapes(2) | CACHE)
    ran = every(text)
    assert [line.split(": ", 1)[1] for line in reasons(ran, "rope_write")] == [reason]
    assert "fxc.norm_rope.default" in ran.text
    assert "fxc.kv_write.default" in ran.text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda q, k, v, a, b, s: (kv_write(k, v, a, b, s), k + 1)[1], "its value is used by add_1, too"),
        (lambda q, k, v, a, b, s: (kv_write(k, v, a, b, s), q)[1][:, :0] + 1, ""),
        (lambda q, k, v, a, b, s: (kv_write(k, q[:, :2], a, b, s), q)[1], "is computed from what is turned, too"),
        (lambda q, k, v, a, b, s: (a.mul_(2), kv_write(k, v, a, b, s), q)[2], "writes between the rotation and kv_write"),
        (lambda q, k, v, a, b, s: (q := q + a[0, 0, 0], kv_write(k, v, a, b, s), q)[2], "reads a cache before kv_write writes into it"),
    ],
    ids=["keys used again", "queries used", "values of queries", "a write between", "a read between"],
)  # fmt: skip
def test_what_stands_against_it(body: Callable[..., Any], reason: str) -> None:
    def function(
        x: Tensor, cos: Tensor, sin: Tensor, a: Tensor, b: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q, k, v = x.split([HEADS, 2, 2], -2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        out: Tensor = body(halves(q, cos, sin), halves(k, cos, sin), v, k_cache, v_cache, slots)
        return out

    text = piece(function, shapes(2) | CACHE)
    ran = every(text)
    assert [line.split(": ", 1)[1] for line in reasons(ran, "rope_write")] == ([reason] if reason else [])
    arguments = given(text, 5)
    for have, want in zip(run(ran.text, arguments), run(text, arguments), strict=True):
        assert not have.numel() or float(row_errors(have, want).max()) < 2e-2


def test_keys_that_are_not_turned_are_no_near_miss() -> None:
    def function(k: Tensor, v: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> None:
        kv_write(k * 2, v, a, b, slots)

    keys = {"k": f"bfloat16[n, 2, {D}]", "v": f"bfloat16[n, 2, {D}]"}
    text = piece(function, {**keys, **dict(zip("ab", CACHE.values(), strict=False)), "slots": "int64[n]"})
    assert not reasons(every(text), "rope_write")
    assert not outcome(alone(text, "rope_write"), "rope_write").matches


def test_ops_that_read_what_others_give_are_all_put_into_a_binary() -> None:
    """As the residual of a layer goes from norm to norm."""
    from torch import fx

    from fxc._torch_build import Symbols
    from fxc.expand import expand
    from fxc.graph_text import parse_layout
    from fxc.piece_jobs import _kernels
    from fxc.scalars import compute
    from tests.building import target

    options = "eps=1e-05, limit=448.0)\n"
    text = (
        'def piece(in_0: "f32[n, 8]", in_1: "f32[8]", in_2: "f32[]"):\n'
        f"    a = torch.ops.fxc.norm_fp8.default(in_0, in_0, in_1, in_2, {options}"
        "    b = a[2]  # f32[n, 8]\n"
        f"    c = torch.ops.fxc.norm_fp8.default(b, in_0, in_1, in_2, {options}"
        "    d = c[2]  # f32[n, 8]\n    return (d,)\n"
    )
    graph, layouts = parse_graph(text)
    symbols = Symbols({"n": (1, 64, 61)})
    shapes = [(parse_layout(layout), layout) for layout in layouts]
    fakes = tuple(
        symbols.tensor([compute(size, symbols.values) for size in sizes], None, kind, "cpu")
        for (kind, sizes, _), _ in shapes
    )
    module = expand(fx.GraphModule({}, graph), fakes, symbols, _kernels(target()))
    assert "fxc" not in str(module.graph)
    x = torch.randn(3, 8)
    torch.testing.assert_close(module(x, torch.ones(8), torch.tensor(0.1))[0], x * 3)
