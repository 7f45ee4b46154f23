"""Made-up tensors, and graphs that run on them."""

from __future__ import annotations

import pytest
import torch

from fxc.graph_run import copied, drawn, seeded


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


def test_seeded_numbers_are_the_same_and_the_callers_stay() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with seeded("cpu"):
        first = torch.rand(3)
        torch.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded("cpu"):
        assert torch.equal(torch.rand(3), first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_gpu_is_left_with_another_seed(device: str) -> None:
    torch.cuda.init()
    torch.manual_seed(5)
    before = torch.cuda.get_rng_state_all()
    with seeded(device):
        first = torch.rand(3, device="cuda")
        torch.manual_seed(7)
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), before))
    with seeded("cuda"):
        assert device == "cpu" or torch.equal(torch.rand(3, device="cuda"), first)
