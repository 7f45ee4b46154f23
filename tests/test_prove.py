"""Tolerances, points and the comparison of a binary with eager."""

from __future__ import annotations

import math

import pytest
import torch

from fxc import piece_jobs, prove
from fxc.errors import ProofError
from fxc.prove import OUTLIERS, TOLERANCES, Jumps, affordable, compare, jumps, row_errors, tolerance

PIECE = 'def piece(in_0: "f32[n, 8]"):\n    neg = torch.ops.aten.neg.default(in_0)  # f32[n, 8]\n    return (neg,)\n'


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('in_0: "f32[n]"', "float32"),
        ('in_0: "f64[n]"', "float64"),
        ('in_0: "f32[n]", in_1: "bf16[n]"', "bfloat16"),
        ('in_0: "f32[n]"\n to.dtype(in_0, torch.float16)', "float16"),
        ('in_0: "f32[n]"\n to.dtype(in_0, torch.float8_e4m3fn)', "float8_e4m3fn"),
    ],
)
def test_tolerance_is_that_of_the_least_precise_dtype(text: str, name: str) -> None:
    assert tolerance(text) == TOLERANCES[name]


def test_integers_are_exact() -> None:
    assert tolerance('in_0: "i64[n]"') == 0.0


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("aten.argmax.default(in_0)  # i64[n]", True),
        ("aten.to.dtype(in_0, torch.float8_e4m3fn)  # f8e4m3fn[n, 8]", True),
        ("aten.to.dtype(in_0, torch.int64)  # i64[n, 8]", True),
        ("aten.to.dtype(in_0, torch.bfloat16)  # bf16[n, 8]", False),
        ("aten.gt.Scalar(in_0, 0)  # b8[n, 8]", True),
        ("aten.gt.Scalar(in_1, 0)  # b8[n]", False),
        ("aten.gelu.default(in_0)  # f32[n, 8]", False),
        ("aten.repeat.default(in_0, [2])  # f32[2*n, 8]", False),
    ],
)
def test_ops_after_which_rows_may_jump(line: str, found: bool) -> None:
    text = f'def piece(in_0: "f32[n, 8]", in_1: "i64[n]"):\n    op = torch.ops.{line}\n    return (op,)\n'
    assert jumps(text) == Jumps(frozenset({0} if found else ()), frozenset())


def test_only_what_lies_behind_such_an_op_may_jump() -> None:
    text = """\
def piece(in_0: "f32[n, 8]", in_1: "f32[n, 8]", in_2: "i64[n]"):
    topk = torch.ops.aten.topk.default(in_0, 2)
    values = topk[0]  # f32[n, 2]
    to = torch.ops.aten.to.dtype(in_1, torch.bfloat16)  # bf16[n, 8]
    sum_1 = torch.ops.aten.sum.default(values)  # f32[]
    torch.ops.aten.add_.Tensor(in_1, sum_1)
    add = torch.ops.aten.add.Tensor(in_2, 1)  # i64[n]
    return (to, sum_1, add, values)
"""
    assert jumps(text) == Jumps(frozenset({1, 3}), frozenset({1}))


def test_parameters_on_lines_of_their_own() -> None:
    text = """\
def piece(
    in_0: "f32[n, 8]",
    in_1: "f32[n, 8]",
):
    gt = torch.ops.aten.gt.Scalar(in_0, 0.0)  # b8[n, 8]
    return (gt,)
"""
    assert jumps(text) == Jumps(frozenset({0}), frozenset())


def test_row_errors() -> None:
    want = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
    assert row_errors(want, want).tolist() == [0, 0, 0, 0]
    off = want + torch.tensor([[0.0, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert row_errors(off, want).tolist() == [pytest.approx(0.1), 0, 0, 0]
    assert math.isinf(row_errors(torch.zeros(1, 2), torch.tensor([[math.nan, 0.0]])).item())
    assert math.isinf(row_errors(torch.tensor([-math.inf]), torch.tensor([math.inf])).item())


def test_row_errors_of_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at a time, which does not show."""
    want = torch.randn(37, 5, 8)
    have = want + torch.randn(37, 5, 8) * 1e-3
    whole = row_errors(have, want)
    monkeypatch.setattr(prove, "AT_ONCE", 50)
    assert row_errors(have, want).tolist() == whole.tolist()
    flat = row_errors(have.flatten(), want.flatten())
    assert flat.shape == (37 * 5 * 8,)


def test_checks_share_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest sizes of a piece with large weights get two shares."""
    free = piece_jobs.HELD << 30
    monkeypatch.setattr(piece_jobs, "_free_bytes", lambda device: free)
    assert piece_jobs._afforded("cpu", 1) == (1 << 30, 1 << 30)
    assert piece_jobs._afforded("cpu", 8) == (1 << 27, 1 << 28)


def test_a_row_of_zeros_is_measured_by_its_neighbours() -> None:
    want = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert row_errors(want + 1e-6, want)[1].item() == pytest.approx(2.83e-6, rel=0.01)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_equal_tensors_of_any_kind(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape).to(dtype)
    assert compare([tensor], [tensor.clone()], 1, PIECE, "n=1")["max_rel_err"] == 0.0


def test_equal_bytes_are_equal() -> None:
    """Of a type without comparison, NaN among them."""
    row = torch.tensor([[math.nan, 448.0, -0.0]]).to(torch.float8_e4m3fn)
    assert row_errors(row, row.clone()).tolist() == [0.0]
    assert row_errors(row, row.float()).tolist() == [0.0]


def test_errors_name_the_tensor() -> None:
    one = torch.ones(4, 8)
    with pytest.raises(ProofError, match=r"result 0 at n=4: relative error 0\.\d+ in 1 of 4 rows, accepted is 0.0001"):
        compare([one + torch.eye(4, 8)[:1] * 0.5 * torch.tensor([[1.0], [0], [0], [0]])], [one], 1, PIECE, "n=4")
    with pytest.raises(ProofError, match=r"input 1 afterwards at n=4"):
        compare([one, one, one], [one, one, one * 2], 1, PIECE, "n=4")
    with pytest.raises(
        ProofError, match=r"result 0 at n=4 is torch.float32\[4, 8\], eager gives torch.float32\[8, 4\]"
    ):
        compare([one], [one.reshape(8, 4)], 1, PIECE, "n=4")
    with pytest.raises(ProofError, match=r"has strides \(1, 4\), eager gives \(8, 1\)"):
        compare([torch.ones(8, 4).t()], [one], 1, PIECE, "n=4")
    with pytest.raises(ProofError, match="int32"):
        compare([one.int()], [one], 1, PIECE, "n=4")


def test_strides_that_decide_nothing() -> None:
    compare([torch.ones(8, 1).t()], [torch.ones(1, 8)], 1, PIECE, "n=1")
    compare([torch.ones(8, 0).t()], [torch.ones(0, 8)], 1, PIECE, "n=0")


def test_few_rows_may_jump_where_ops_jump() -> None:
    want = torch.ones(200, 8)
    have = want.clone()
    have[: int(200 * OUTLIERS)] = 2
    rounding = PIECE.replace("neg", "round")
    found = compare([have], [want], 1, rounding, "n=200")
    assert (found["max_rel_err"], found["excused"]) == (pytest.approx(1.0), 4)
    with pytest.raises(ProofError):
        compare([have], [want], 1, PIECE, "n=200")
    have[1] = math.nan
    with pytest.raises(ProofError, match="relative error inf"):
        compare([have], [want], 1, rounding, "n=200")
    have[0:5] = 2
    with pytest.raises(ProofError, match="5 of 200 rows"):
        compare([have], [want], 1, rounding, "n=200")


def test_points_that_fit_the_memory() -> None:
    budget = 64 << 10
    most = 4 * budget
    assert affordable(PIECE, {"n": 1000}, {"n": 1}, prove.POINT_BYTES, most) == {"n": 1000}
    assert affordable(PIECE, {"n": 4096}, {"n": 1}, budget, most) == {"n": 1024}
    assert affordable(PIECE, {"n": 4096}, {"n": 3000}, budget, most) == {"n": 3000}
    assert affordable(PIECE, {"n": 4096}, {"n": 3000}, budget, budget) is None
    assert affordable(PIECE, {"n": 99999}, {"n": 99999}, budget, most) is None
    square = 'def piece(in_0: "f32[n, n, m]"):\n    return (in_0,)\n'
    assert affordable(square, {"n": 256, "m": 1}, {"n": 1, "m": 1}, budget, most) == {"n": 128, "m": 1}
