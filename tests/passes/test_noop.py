"""No-op elimination: what goes, and what only looks as if it might."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxc.shapes import Range
from tests.passes.pieces import alone, execute, inputs, outcome, piece, reasons

X = {"x": "float32[n, 12]"}
Function = Callable[..., object]


def everything(x: Tensor) -> Tensor:
    x = x * 2
    x = x.reshape(-1, 12) + x.view_as(x)
    x = x[:, 0:12] + x[:, -12:] + x[:, ::1] + x[:, :1000] + x[:]
    x = x.expand(-1, 12) + x.expand_as(x) + x.clone() + x.float() + x.to(torch.float32) + x.contiguous()
    return torch.slice_scatter(x, x * 3, 1, 0, 12) + x.flatten(0, -1).unflatten(0, (-1, 12))


def test_golden(golden: Callable[[str, str], None]) -> None:
    text = piece(everything, X)
    golden("pass_noop.txt", f"{text}\n\n{alone(text, 'noop').text}")


def test_nothing_of_it_is_left_and_it_computes_the_same() -> None:
    text = piece(everything, X)
    ran = alone(text, "noop")
    ops = {line.split(".")[3] for line in ran.text.splitlines() if "torch.ops." in line}
    assert ops <= {"mul", "add", "flatten", "unflatten"}
    for n in (1, 2, 7):
        given = inputs(text, {"n": n})
        torch.testing.assert_close(execute(ran.text, given), execute(text, given), rtol=0, atol=0)


REAL: dict[str, Function] = {
    "up to the last but one": lambda x: (x * 2)[:, 0:-1] * 2,
    "from the second": lambda x: (x * 2)[:, 1:] * 2,
    "rows but the last": lambda x: (x * 2)[0:-1].sum(0),
    "every second": lambda x: (x * 2)[:, ::2] * 2,
    "another shape": lambda x: (x * 2).reshape(-1, 6) * 2,
    "other strides": lambda x: (x * 2).t().clone(memory_format=torch.contiguous_format) * 2,
    "another dtype": lambda x: (x * 2).double() * 2,
    "a part scattered": lambda x: torch.slice_scatter(x * 2, x[:, :6] * 3, 1, 0, 6) * 2,
    "rows repeated": lambda x: (x * 2).sum(0, keepdim=True).expand(3, 12) * 2,
}


@pytest.mark.parametrize("name", REAL)
def test_what_does_something_stays(name: str) -> None:
    text = piece(REAL[name], X)
    assert alone(text, "noop").text == text


def test_where_all_sizes_of_a_range_are_small_a_slice_of_rows_does_nothing() -> None:
    """The same piece, for 1..64 and for 1..32 or 5 alone."""
    text = (
        'def piece(in_0: "f32[n, 12]"):\n'
        "    slice_0 = torch.ops.aten.slice.Tensor(in_0, 0, 0, 32)  # f32[min(32, n), 12]\n"
        "    mul = torch.ops.aten.mul.Tensor(slice_0, 2)  # f32[min(32, n), 12]\n"
        "    return (mul,)\n"
    )
    assert alone(text, "noop").text == text
    for box in (Range((("n", 1, 32),)), Range((("n", 5, 5),))):
        ran = alone(text, "noop", box)
        assert outcome(ran, "noop").matches == ("slice_0",)
        given = inputs(text, box.low())
        torch.testing.assert_close(execute(ran.text, given), execute(text, given), rtol=0, atol=0)
    assert alone(text, "noop", Range((("n", 1, 33),))).text == text


def written_after(x: Tensor) -> Tensor:
    y = x * 2
    kept = y.clone()
    y.add_(1)
    return y * kept


def copy_written(x: Tensor) -> Tensor:
    y = x * 2
    kept = y.clone()
    kept.add_(1)
    return y * kept


def view_written(x: Tensor) -> Tensor:
    y = x * 2
    kept = y.clone()
    y[:, 2:4].zero_()
    return y * kept


def input_written(x: Tensor) -> Tensor:
    kept = x.clone()
    x.mul_(2)
    return x + kept


@pytest.mark.parametrize("function", [written_after, copy_written, view_written, input_written])
def test_a_copy_stays_where_one_of_the_two_is_written(function: Function) -> None:
    text = piece(function, X)
    ran = alone(text, "noop")
    assert "clone" in ran.text
    assert reasons(ran, "noop") == ["clone: it is a copy, and one of the two is written into"]


def test_a_copy_that_is_returned_stays() -> None:
    """A result is a tensor of its own; so is what a view of it shows."""
    text = piece(lambda x: (x.clone(), (x * 2).clone().view(-1)), X)
    ran = alone(text, "noop")
    assert ran.text == text
    assert reasons(ran, "noop") == [
        "clone: it is a copy, and the piece returns it",
        "clone_1: it is a copy, and the piece returns a view of it",
    ]


def test_a_view_goes_whoever_writes() -> None:
    """Both names are of the same memory before and after."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        same = y[:, :]
        y.add_(1)
        return same * 3

    text = piece(function, X)
    ran = alone(text, "noop")
    assert "slice" not in ran.text
    given = inputs(text, {"n": 3})
    torch.testing.assert_close(execute(ran.text, given), execute(text, given), rtol=0, atol=0)


def test_what_is_computed_twice_is_computed_once() -> None:
    """Views of views, results of one split and ops of several arguments included."""

    def function(x: Tensor, table: Tensor) -> Tensor:
        def turned(part: Tensor) -> Tensor:
            return part * table.unsqueeze(1).float().cos()

        first, _ = x.chunk(2, -1)
        again, second = x.chunk(2, -1)
        return turned(first).abs() + turned(again).abs() + turned(second)

    text = piece(function, {"x": "float32[n, 3, 8]", "table": "float16[n, 4]"})
    ran = alone(text, "noop")
    for op, before, after in (("chunk", 2, 1), ("unsqueeze", 3, 1), ("cos", 3, 1), ("mul", 3, 2), ("abs", 2, 1)):
        assert (text.count(f"aten.{op}."), ran.text.count(f"aten.{op}.")) == (before, after), op
    given = inputs(text, {"n": 5})
    torch.testing.assert_close(execute(ran.text, given), execute(text, given), rtol=0, atol=0)


TWICE: dict[str, Function] = {
    "both returned": lambda x: (x * 2, x * 2),
    "views of both returned": lambda x: ((x * 2).t(), (x * 2).view(-1)),
    "one of them written": lambda x: (x * 2).add_(1) + x * 2,
    "what they read written between": lambda x: x * 2 + x.add_(1) + x * 2,
    "one written by another name": lambda x: ((y := torch.atleast_2d(x * 2)).add_(1), x * 2)[1] + y,
    "one written by a view that is none by its schema": lambda x: (
        (y := torch.einsum("ij->ji", x * 2)).add_(1),
        (x * 2).sum(1),
        y,
    ),
    "one of several that are written": lambda x: (
        (y := torch.broadcast_tensors(x * 3, x * 2)[1]).add_(1),
        x * 2 + y,
    ),
    "a part of it written": lambda x: (
        (y := x * 2, u := torch.unsafe_split(y, 6, 1)[0], p := u * 3),
        y.add_(1),
        p - u * 3,
    )[2],
    "returned in parts": lambda x: (torch.unsafe_split(x * 2, 6, 1)[0], torch.unsafe_split(x * 2, 6, 1)[0]),
    "statistics that training writes": lambda x: (
        (m := x.sum(0), v := m.abs(), p := m + 1),
        torch.nn.functional.batch_norm(x, m, v, training=True) + torch.nn.functional.batch_norm(x, m, v, training=True),
        p - (m + 1),
    )[1:],
    "returned by another name": lambda x: ((x * 2).type_as(x), (x * 2).type_as(x)),
    "random": lambda x: torch.rand_like(x) + torch.rand_like(x),
    "sizes that depend on data": lambda x: (y := x[:, 0] > 0).nonzero().sum(0) + y.nonzero().sum(0) + x.sum(),
    "numbers read from data": lambda x: (y := x.sum()).item() + y.item() + x,
    "numbers of another kind": lambda x: torch.full_like(x, 1) - torch.full_like(x, 1.0) + x,
    "other signs of zero": lambda x: torch.full_like(x, 0.0) / x + torch.full_like(x, -0.0) / x,
}


@pytest.mark.parametrize("name", TWICE)
def test_what_only_looks_as_if_it_were_the_same_twice(name: str) -> None:
    text = piece(TWICE[name], X)
    ran = alone(text, "noop")
    given = inputs(text, {"n": 3})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        have = execute(ran.text, given)
        torch.manual_seed(0)
        torch.testing.assert_close(have, execute(text, given), rtol=0, atol=0, equal_nan=True)
    assert outcome(ran, "noop").matches == ()


def test_results_have_memory_of_their_own() -> None:
    """One of those that are returned may stand for those that are not, in whatever order."""
    text = piece(lambda x: ((x * 2).sum(1), x * 2, x * 2, (x * 2).sum(0)), X)
    ran = alone(text, "noop")
    assert ran.text.count("aten.mul.") == 2
    given = inputs(text, {"n": 3})
    results = execute(ran.text, given)
    torch.testing.assert_close(results, execute(text, given), rtol=0, atol=0)
    assert len({result.data_ptr() for result in results}) == 4


def test_sizes_that_depend_on_data_are_never_the_same() -> None:
    text = (
        'def piece(in_0: "f32[n, 8]"):\n'
        "    a = torch.ops.aten.neg.default(in_0)  # f32[u0, 8]\n"
        "    b = torch.ops.aten.slice.Tensor(a, 0, 0, 4)  # f32[u1, 8]\n"
        "    c = torch.ops.aten.neg.default(b)  # f32[u1, 8]\n"
        "    return (c,)\n"
    )
    assert alone(text, "noop").text == text
