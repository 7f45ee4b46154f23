"""`fxc::kv_write` against a loop over the rows, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxc.errors import InputError
from fxc.ops import kv_write
from fxc.ops.kv_write import scatter

SLOTS = {
    "all": [3, 0, 11, 7],
    "some": [-1, 11, -1, 0],
    "beside the last": [11, -1, 5, -1],
    "none": [-1, -1, -1, -1],
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = ((4, 2, 8), (4, 2, 5), (3, 4, 2, 8), (3, 4, 2, 5))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)  # type: ignore[return-value]


def row_by_row(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> list[Tensor]:
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_cache[slot // 4, slot % 4] = k[token]
            v_cache[slot // 4, slot % 4] = v[token]
    return [k_cache, v_cache]


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_the_rows_that_have_a_slot(name: str, dtype: torch.dtype) -> None:
    args, slots = inputs(dtype), torch.tensor(SLOTS[name])
    expected = row_by_row(*args, slots)
    assert kv_write(*args, slots) is None
    assert torch.equal(args[2], expected[0])
    assert torch.equal(args[3], expected[1])


def test_no_rows() -> None:
    kv_write(
        torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), *(torch.zeros(3, 4, 2, 8) for _ in range(2)), torch.zeros(0).long()
    )


def test_new_rows_may_be_slices() -> None:
    args, slots = inputs(), torch.tensor(SLOTS["some"])
    fused = torch.cat((args[0], torch.zeros(4, 3, 8)), 1)
    kv_write(fused[:, :2], *args[1:], slots)
    assert torch.equal(args[2], row_by_row(*args, slots)[0])


def test_the_scatter_is_traced_without_looking_at_data() -> None:
    """One graph for any number of rows, with the caches as its inputs and written in place."""

    class Write(torch.nn.Module):
        def forward(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
            scatter(k * 2, v, k_cache, v_cache, slots)
            return k + 1

    tokens = torch.export.Dim("tokens", min=1, max=64)
    example = (*inputs(), torch.tensor(SLOTS["some"]))
    dims = ({0: tokens}, {0: tokens}, None, None, {0: tokens})
    program = torch.export.export(Write(), example, dynamic_shapes=dims, strict=False)
    assert not any("item" in str(node.target) for node in program.graph.nodes)
    for name, rows in (("some", 4), ("none", 4), ("all", 1)):
        args, slots = inputs(), torch.tensor(SLOTS[name])[:rows]
        k, v, k_cache, v_cache = args
        expected = row_by_row(k[:rows] * 2, v[:rows], k_cache, v_cache, slots)
        program.module()(k[:rows], v[:rows], k_cache, v_cache, slots)
        assert torch.equal(k_cache, expected[0])
        assert torch.equal(v_cache, expected[1])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("k", {"k": torch.zeros(4, 8)}, "has 2 dimensions"),
    ("k_cache", {"k_cache": torch.zeros(3, 4, 2, 7)}, r"holds \[2, 7\], expected \[2, 8\]"),
    ("v_cache", {"v_cache": torch.zeros(3, 3, 2, 5)}, "has 3 slots in a block, expected 4"),
    ("v_cache", {"v_cache": torch.zeros(3, 4, 2, 5).half()}, "is torch.float16"),
    ("slot_mapping", {"slot_mapping": torch.zeros(4).int()}, "is torch.int32"),
    ("slot_mapping", {"slot_mapping": torch.zeros(3).long()}, "has 3 tokens, expected 4"),
]


@pytest.mark.parametrize(
    ("argument", "changed", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refuses_by_name(argument: str, changed: dict[str, Any], message: str) -> None:
    names = ("k", "v", "k_cache", "v_cache", "slot_mapping")
    given = dict(zip(names, (*inputs(), torch.tensor(SLOTS["all"])), strict=True)) | changed
    with pytest.raises(InputError, match=f"fxc::kv_write: {argument} .*{message}"):
        kv_write(**given)


def test_schema_and_fake_agree_with_what_it_does() -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kv_write, (*inputs(), torch.tensor(SLOTS["some"])), test_utils=checks)
