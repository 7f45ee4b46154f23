"""Made-up tensors, and graphs that run on them."""

from __future__ import annotations

import pytest
import torch

from fxc.graph_run import copied, drawn


@pytest.mark.parametrize(
    "layout",
    ["f32[n, 8]", "bf16[8, n] strides [1, 8]", "f32[3, 8] strides [0, 1]", "i64[n, 3] strides [5, 1]",
     "f32[2, n, 4] strides [4*n, 1, n]", "b8[0, n]", "f32[4, 4] strides [1, 1]", "f8e4m3fn[n, n]", "c64[n]"],
)  # fmt: skip
def test_made_up_inputs_are_laid_out_as_said(layout: str) -> None:
    tensor = drawn(layout, {"n": 6}, None, "cpu", 3)
    copy = copied(tensor)
    assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(copy.to(torch.complex64), tensor.to(torch.complex64))
    assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


def test_made_up_integers_stay_in_their_range() -> None:
    values = drawn("i64[n]", {"n": 500}, (3, 7), "cpu", 0)
    assert set(values.tolist()) == {3, 4, 5, 6}
