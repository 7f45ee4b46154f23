"""Linear layers of one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxc.passes import run
from fxc.passes.row_linear import RowLinear
from fxc.shapes import Range
from tests.passes.pieces import execute, inputs, outcome, piece, reasons

ONE = Range((("n", 1, 1),))
SHAPES = {"x": "bfloat16[1, n, 1024]", "w": "bfloat16[2048, 1024]", "b": "bfloat16[2048]"}


def with_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w, b)


def without_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w)


def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x[0] @ w.t()


def turned(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x[0], w.transpose(0, 1))


def rewritten(function: Any, box: Range, **shapes: str) -> tuple[str, Any]:
    text = piece(function, {**SHAPES, **shapes}, Range((("n", 1, 8),)))
    return text, run(text, box, [RowLinear()])


@pytest.mark.parametrize("function", [with_bias, without_bias, product, turned])
def test_one_row(function: Any) -> None:
    text, ran = rewritten(function, ONE)
    assert len(outcome(ran, "row_linear").matches) == 1
    assert "torch.ops.fxc.gemv.default" in ran.text
    given = inputs(text, {"n": 1})
    (found,), (expected,) = execute(ran.text, given), execute(text, given)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)


def test_golden(golden: Callable[[str, str], None]) -> None:
    text, ran = rewritten(with_bias, ONE)
    golden("pass_row_linear.txt", f"{text}\n\n{ran.text}")


def test_several_rows() -> None:
    text, ran = rewritten(with_bias, Range((("n", 1, 8),)))
    assert ran.text == text
    text, ran = rewritten(with_bias, ONE, x="bfloat16[2, n, 1024]")
    assert ran.text == text


@pytest.mark.parametrize(
    "shapes",
    [
        {"w": "bfloat16[512, 1024]", "b": "bfloat16[512]"},
        {"x": "float32[1, n, 1024]", "w": "float32[2048, 1024]", "b": "float32[2048]"},
    ],
)
def test_small_and_wide_weights_are_left_to_the_compiler(shapes: dict[str, str]) -> None:
    text, ran = rewritten(with_bias, ONE, **shapes)
    assert ran.text == text
    assert ran.outcomes == ()


def transposed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x[0] @ w.view(1024, 2048)


def test_a_weight_that_is_not_read_by_rows() -> None:
    text, ran = rewritten(transposed, ONE)
    assert ran.text == text
    assert reasons(ran, "row_linear") == ["view: is aten::view, expected aten::t or aten::transpose"]
