from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fxc.errors import WeightError
from fxc.manifest import Weight
from fxc.runtime import load
from fxc.runtime.weights import collect, open_source

CPU = torch.device("cpu")
W = Weight(name="linear.weight", shape=(2, 3), dtype="float32", aliases=("head.weight",))
B = Weight(name="linear.bias", shape=(2,), dtype="float32")
STATE = Weight(name="state", shape=(2, 2), dtype="float32", buffer=True, mutated=True)


def bind(source: Any, *weights: Weight, strict: bool | None = None) -> list[torch.Tensor]:
    return collect(weights or (W, B), open_source(source, CPU), CPU, strict)


def good() -> dict[str, torch.Tensor]:
    return {"linear.weight": torch.arange(6.0).reshape(2, 3), "linear.bias": torch.tensor([1.0, 2.0])}


def message(source: Any, *weights: Weight, strict: bool | None = None) -> str:
    with pytest.raises(WeightError) as info:
        bind(source, *weights, strict=strict)
    return f"{info.value.message} | {info.value.hint}"


def test_a_mapping_is_used_without_copy() -> None:
    tensors = good()
    weight, bias = bind(tensors)
    assert (weight.data_ptr(), bias.data_ptr()) == tuple(tensor.data_ptr() for tensor in tensors.values())


def test_a_module_with_tied_names_and_more_than_needed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.head = nn.Linear(3, 2, bias=False)
            self.head.weight = self.linear.weight
            self.pooler = nn.Linear(2, 2)
            self.register_buffer("state", torch.zeros(2, 2), persistent=False)

    module = Tied()
    weight, bias, state = bind(module, W, B, STATE)
    assert weight.data_ptr() == module.linear.weight.data_ptr()
    assert type(weight) is torch.Tensor
    assert state is module.state or state.data_ptr() == module.state.data_ptr()  # type: ignore[operator]
    with torch.no_grad():
        torch.nn.init.constant_(module.linear.bias, 7.0)
    assert bias.tolist() == [7.0, 7.0]
    assert message(module, W, B, STATE, strict=True) == (
        "2 problems with the weights: pooler.weight is not a weight of the program; pooler.bias is not a weight of the "
        "program | bind(..., strict=False) ignores tensors that the program does not use"
    )


def test_files_folders_shards_and_index(tmp_path: Path) -> None:
    tensors = good()
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"linear.weight": tensors["linear.weight"]}, one)
    save_file({"linear.bias": tensors["linear.bias"]}, two)
    for source in ([one, str(two)], tmp_path, str(tmp_path)):
        assert [tensor.tolist() for tensor in bind(source)] == [t.tolist() for t in tensors.values()]
    save_file({"other": torch.zeros(1)}, tmp_path / "c.safetensors")
    assert message(tmp_path).startswith("other is not a weight of the program")
    index = {"metadata": {}, "weight_map": {"linear.weight": one.name, "linear.bias": two.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert len(bind(source)) == 2
    two.unlink()
    assert message(tmp_path) == f"{two} does not exist, expected a .safetensors file | "


def test_writing_into_a_weight_from_a_file_leaves_the_file(tmp_path: Path) -> None:
    save_file({"state": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    (state,) = bind(tmp_path / "a.safetensors", STATE)
    state.add_(1)
    assert bind(tmp_path / "a.safetensors", STATE)[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_files_that_are_none(tmp_path: Path) -> None:
    pickled = tmp_path / "model.bin"
    pickled.write_bytes(b"PK" * 100)
    assert message(pickled).startswith(f"{pickled} cannot be read as .safetensors: ")
    assert message(pickled).endswith(" | convert the checkpoint: pickled ones are not read")
    assert message(tmp_path).startswith(f"{tmp_path} holds no .safetensors file")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "is not an index of shards" in message(tmp_path)
    assert message(3) == (
        "cannot bind int, expected a .safetensors path or paths, a mapping of name to tensor, or an nn.Module | "
    )


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file(good(), tmp_path / f"{name}.safetensors")
    assert message(tmp_path).startswith("weight linear.bias is in two files, " + str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"linear.weight": torch.zeros(3, 2)},
            "weight linear.weight is float32[3, 2], expected float32[2, 3] | ",
        ),
        (
            {"linear.bias": torch.zeros(2).bfloat16()},
            "weight linear.bias is bfloat16[2], expected float32[2] | "
            "cast it first: tensor.to(torch.float32), and bind the mapping",
        ),
        (
            {"linear.bias": torch.zeros(2, device="meta")},
            "weight linear.bias is on meta, expected cpu | move it: .to('cpu')",
        ),
        ({"linear.bias": None}, "weight linear.bias is missing, expected float32[2] | "),
        ({"linear.weight": None}, "weight linear.weight (or head.weight) is missing, expected float32[2, 3] | "),
        (
            {"linear.bias": None, "linear.bais": torch.zeros(2)},
            "2 problems with the weights: weight linear.bias is missing, expected float32[2]; linear.bais is not a "
            "weight of the program | the nearest name that came is linear.bais",
        ),
        (
            {"pooler.dense": torch.zeros(1)},
            "pooler.dense is not a weight of the program | "
            "bind(..., strict=False) ignores tensors that the program does not use",
        ),
        (
            {"head.weight": torch.zeros(2, 3)},
            "weights linear.weight and head.weight differ, expected equal ones: the model ties them | "
            "bind the tensor under one of the names only",
        ),
        (
            {"linear.bias": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)},
            "weight linear.bias is a nested tensor, expected a torch.Tensor of one shape | "
            "pad it: torch.nested.to_padded_tensor(tensor, padding)",
        ),
        ({"linear.bias": [1.0, 2.0]}, "weight linear.bias is list [1.0, 2.0], expected a torch.Tensor | "),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], expected: str) -> None:
    given = {name: value for name, value in {**good(), **change}.items() if value is not None}
    assert message(given) == expected


def test_the_same_words_for_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"linear.weight": torch.zeros(2, 3).half(), "linear.bias": torch.zeros(3)}, path)
    assert message(path).startswith(
        "2 problems with the weights: weight linear.weight is float16[2, 3], expected float32[2, 3]; "
        "weight linear.bias is float32[3], expected float32[2]"
    )


def test_many_problems_are_counted() -> None:
    text = message({f"w{index}": torch.zeros(1) for index in range(20)}, B)
    assert text.startswith(
        "21 problems with the weights: weight linear.bias is missing, expected float32[2]; w0 is not"
    )
    assert "w3 is not a weight of the program; and 16 more | " in text


def test_an_unused_tensor_can_be_ignored() -> None:
    assert len(bind({**good(), "pooler.dense": torch.zeros(1)}, strict=False)) == 2


def test_any_alias_is_enough_and_equal_ones_are_fine() -> None:
    tensors = good()
    shared = tensors.pop("linear.weight")
    assert bind({**tensors, "head.weight": shared})[0].data_ptr() == shared.data_ptr()
    nan = torch.full((2, 3), float("nan"))
    assert bind({**tensors, "head.weight": nan, "linear.weight": nan.clone()})[0].isnan().all()


def test_strided_weights_are_copied_and_mutated_ones_refused() -> None:
    strided = torch.arange(6.0).reshape(3, 2).t()
    assert bind({**good(), "linear.weight": strided})[0].is_contiguous()
    assert message({"state": torch.zeros(2, 2).t()}, STATE) == (
        "weight state has stride (1, 2) for shape (2, 2), expected a contiguous, aligned tensor because the program "
        "writes into it | "
    )


def test_a_written_weight_overlaps_no_other_weight() -> None:
    base = torch.zeros(16)
    tensors = {"linear.bias": base[2:4], "state": base[4:8].view(2, 2)}
    assert len(bind(tensors, B, STATE)) == 2
    for bias in (base[3:5], base[6:8], base[3:13:9]):
        assert message({**tensors, "linear.bias": bias}, B, STATE) == (
            "weight state, which the program writes into, overlaps in memory with weight linear.bias | "
            "bind a copy of one of them"
        )
    other = Weight(name="other", shape=(2, 2), dtype="float32", mutated=True)
    assert message({**tensors, "other": tensors["state"]}, B, STATE, other).startswith(
        "2 problems with the weights: weight state, which the program writes into, overlaps in memory with weight other"
    )
    tied = Weight(name="state", shape=(2, 2), dtype="float32", aliases=("again",), mutated=True)
    assert len(bind({**tensors, "again": tensors["state"]}, B, tied)) == 2
    assert len(bind({"linear.bias": base[:2], "linear.weight": base[:6].view(2, 3)})) == 2  # both are only read


def test_a_failed_bind_leaves_the_program_as_it_was(artifact: Callable[..., Path]) -> None:
    program = load(artifact()).bind({"linear.weight": torch.eye(4)})
    with pytest.raises(WeightError):
        program.bind({})
    x, scale = torch.ones(1, 4), torch.ones(1, 1)
    assert program(x, scale).tolist() == [[2.0, 3.0, 4.0, 5.0]]
    assert program.bind({"head.weight": 2 * torch.eye(4)})(x, scale).tolist() == [[3.0, 4.0, 5.0, 6.0]]
