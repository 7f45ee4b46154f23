"""A plan: programs, units, weights, files; nothing is compiled or written."""

# mypy: disable-error-code="no-any-return, operator, index"
from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fxc import pipeline
from fxc.errors import SpecError, TraceError
from fxc.plan import make_plan
from fxc.spec import parse_spec
from tests.building import HERE, check, plan_of, program_of, target
from tests.zoo import calls, memory, outputs, sizes, weights
from tests.zoo.model import Model


def labels(cls: type[Model], **compile: object) -> list[tuple[str, str]]:
    return [(program.range.label, program.step) for program in plan_of(cls, level=2, **compile).manifest.programs]


def test_sizes_come_first_then_ranges_cut_at_branches() -> None:
    assert labels(sizes.BranchAbove, sizes=[8, 1], ranges=[16]) == [
        ("n=1", "step_0"), ("n=8", "step_0"), ("n=1..8", "step_0"), ("n=9..16", "step_1"), ("n=17..64", "step_1"),
    ]  # fmt: skip


def test_a_size_with_a_graph_of_its_own_has_one_program() -> None:
    assert labels(sizes.BranchOne, sizes=[1]) == [("n=1", "step_0"), ("n=2..64", "step_1")]


def test_every_shape_is_served_by_the_right_graph() -> None:
    programs = plan_of(sizes.BranchOfEach, level=2, sizes=[{"batch": 5, "seq": 9}]).manifest.programs
    for batch in range(1, 10):
        for seq in range(1, 34):
            found = {p.step for p in programs if p.range.contains({"batch": batch, "seq": seq})}
            assert len(found) == 1


def test_equal_pieces_are_one_unit() -> None:
    plan = plan_of(calls.EqualLayers, level=2, sizes=[4])
    assert (len(plan.units), plan.unique, plan.pieces) == (6, 3, 9)
    general = plan.manifest.programs[-1]
    assert len(general.binaries) == 5
    assert len(set(general.binaries)) == 3
    assert [unit.label for unit in plan.units[:3]] == ["piece_0 n=4", "piece_1 n=4", "piece_2 n=4"]


def test_a_piece_without_dimensions_is_compiled_once_for_all_sizes() -> None:
    plan = plan_of(weights.WeightViews, level=2, sizes=[1, 2, 4])
    keys = [program.binaries for program in plan.manifest.programs]
    static = [unit for unit in plan.units if not unit.piece.dims]
    assert all(sum(unit.key in binaries for binaries in keys) == 4 for unit in static)


RANDOM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("noise", torch.randn(4), persistent=False)
        torch.manual_seed(1234)

    def forward(self, x):
        return self.lin(x) + self.noise + torch.rand(4)
"""
SPEC = """
model: {target: ./random_model.py:Model}
device: cpu
inputs: {x: {shape: [n, 4], dtype: float32}}
dims: {n: {min: 1, max: 64}}
compile: {level: 0}
"""


def test_a_build_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    """And does not depend on them: what a model draws while it is constructed is part of what it is."""
    (tmp_path / "random_model.py").write_text(RANDOM)
    (tmp_path / "model.yaml").write_text(SPEC)
    hashes = set()
    for seed in (3, 4):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        hashes.add(pipeline.build(tmp_path / "model.yaml", cache_dir=tmp_path / "cache", force=True).hash)
        assert torch.equal(torch.get_rng_state(), before)
    assert len(hashes) == 1


def test_level_0_compiles_nothing() -> None:
    plan = plan_of(calls.EqualLayers)
    assert plan.units == []
    assert {program.binaries for program in plan.manifest.programs} == {()}


def test_weights_and_constants() -> None:
    manifest = plan_of(weights.Buffers).manifest
    assert {weight.name: (weight.shape, weight.dtype, weight.aliases) for weight in manifest.weights} == {
        "scale": ((8,), "float32", ("again",)),
        "order": ((8,), "int64", ()),
    }
    assert {constant.name: constant.shape for constant in manifest.constants} == {"table": (64, 8), "middle": ()}
    tied = plan_of(weights.Tied).manifest.weights
    assert [(weight.name, weight.aliases) for weight in tied] == [("embed.weight", ("head.weight",))]
    assert plan_of(weights.UsesLittle).manifest.unused_weights == ("shape_only", "unused.bias", "unused.weight")


def test_constants_are_stored() -> None:
    plan = plan_of(weights.Constants)
    stored = safetensors.torch.load(plan.files["constants.safetensors"])
    assert set(stored) == {constant.name for constant in plan.manifest.constants}
    assert any(tensor.tolist() == list(range(8)) for tensor in stored.values())
    assert "constants.safetensors" not in plan_of(calls.NoCut).files


def test_what_is_written_is_marked() -> None:
    manifest = plan_of(memory.IndexPut).manifest
    assert {entry.name: entry.mutated for entry in manifest.inputs} == {"x": False, "slots": False, "cache": True}
    state = plan_of(memory.WrittenBuffers).manifest
    assert [(weight.name, weight.mutated) for weight in state.weights] == [("count", True)]
    assert [(constant.name, constant.mutated) for constant in state.constants] == [
        ("total", True),
        ("same_at_first", False),
    ]


def test_outputs_are_told_to_people() -> None:
    assert plan_of(outputs.WeightsReturned).manifest.outputs.startswith("{'w': ")


def test_custom_ops_and_what_registers_them() -> None:
    ops = plan_of(calls.ActInside).manifest.custom_ops
    assert [(op.name, op.module) for op in ops] == [("zoo::act", "tests.zoo.calls"), ("zoo::mix", "tests.zoo.calls")]


def test_sources_hold_the_model() -> None:
    files = {source.file for source in plan_of(calls.NoCut).manifest.sources}
    assert "zoo/calls.py" in files


def test_an_unknown_splitting_op(tmp_path: Path) -> None:
    spec = parse_spec({**calls.NoCut.spec(), "partition": {"splitting_ops": ["zoo::missing"]}})
    with pytest.raises(SpecError, match="'zoo::missing' is no registered op"):
        make_plan(spec, HERE, target())


@pytest.mark.parametrize("name", ["max", "torch", "math"])
def test_dimensions_named_as_functions_of_sizes(name: str) -> None:
    with pytest.raises(SpecError, match=f"dims.{name}"):
        parse_spec(
            {
                **calls.NoCut.spec(),
                "inputs": {"x": {"shape": [name], "dtype": "int64"}},
                "dims": {name: {"min": 1, "max": 2}},
            }
        )


def test_a_size_that_leaves_a_dimension_free() -> None:
    plan = plan_of(sizes.BatchSeq, level=2, sizes=[{"batch": 3}])
    assert [program.range.label for program in plan.manifest.programs] == [
        "batch=3,seq=1..33", "batch=1..9,seq=1..33",
    ]  # fmt: skip
    assert plan.manifest.sizes == [{"batch": 3}]
    assert {unit.range.label for unit in plan.units} == {"batch=3,seq=1..33", "batch=1..9,seq=1..33"}


class Halves(Model):
    """Buffers in one piece of memory: all of it, and its halves."""

    persistent = False

    def __init__(self) -> None:
        super().__init__()
        whole = self.memory()
        low, high = whole[..., :8], whole[..., 8:]
        for name, tensor in (("whole", whole), ("low", low), ("high", high)):
            self.register_buffer(name, tensor, persistent=self.persistent)

    def memory(self) -> torch.Tensor:
        return torch.arange(16.0)


class OnlyRead(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.zoo.mix(x) * self.low + self.whole[8:] * self.high


class OnlyReadAndKept(OnlyRead):
    persistent = True


class OneHalfWritten(Halves):
    """The whole is not read, and the halves have no element in common."""

    def forward(self, x: Tensor) -> Tensor:
        self.low.add_(1)
        return torch.ops.zoo.mix(x) * self.low + self.high


class StridedHalfWritten(OneHalfWritten):
    """The halves of every row, which lie between one another."""

    def memory(self) -> Tensor:
        return torch.arange(32.0).view(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.low.add_(1)
        return torch.ops.zoo.mix(x) * self.low[0] + self.high[1]


class WholeAndHalfWritten(Halves):
    def forward(self, x: Tensor) -> Tensor:
        self.low.add_(1)
        return torch.ops.zoo.mix(x) * self.whole[:8]


class WholeAndHalfWrittenAndKept(WholeAndHalfWritten):
    persistent = True


class StridedWholeAndHalfWritten(Halves):
    def memory(self) -> Tensor:
        return torch.arange(32.0).view(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.low.add_(1)
        return torch.ops.zoo.mix(x) * self.whole[0, :8]


class OneTensorTwiceWritten(Model):
    def __init__(self) -> None:
        super().__init__()
        tensor = torch.zeros(8)
        self.register_buffer("low", tensor)
        self.register_buffer("whole", tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.low.add_(1)
        return torch.ops.zoo.mix(x) * self.low


class ViewOfParameterWritten(Model):
    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.nn.Parameter(torch.zeros(8))
        self.register_buffer("low", self.whole.data[:4])

    def forward(self, x: Tensor) -> Tensor:
        self.low.add_(1)
        return torch.ops.zoo.mix(x) * self.whole


@pytest.mark.parametrize("cls", [OnlyRead, OnlyReadAndKept, OneHalfWritten, StridedHalfWritten])
def test_buffers_in_one_memory(cls: type[Model]) -> None:
    check(cls, program_of(plan_of(cls)))


@pytest.mark.parametrize(
    "cls",
    [
        WholeAndHalfWritten,
        WholeAndHalfWrittenAndKept,
        StridedWholeAndHalfWritten,
        OneTensorTwiceWritten,
        ViewOfParameterWritten,
    ],
)
def test_buffers_in_one_memory_that_is_written(cls: type[Model]) -> None:
    with pytest.raises(TraceError) as info:
        plan_of(cls)
    assert re.fullmatch(
        "the model writes into the buffer (low|whole), which shares memory with (whole|low)", info.value.message
    )
    assert info.value.hint == "make them separate tensors: clone one before it is registered"
