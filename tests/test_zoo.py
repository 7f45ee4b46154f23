"""Models of many kinds: what a program returns, what it writes, and what shares memory equals eager.

All run without compiling, where trace, cases, partition and stitch can be wrong; some compiled too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

import fxc
from fxc import pipeline
from fxc.errors import TraceError
from fxc.rehearse import rehearse
from tests import building
from tests.building import check, plan_of, program_of
from tests.zoo import calls, memory, outputs, sizes, weights
from tests.zoo.model import Model, noted

REFUSED: dict[type[Model], str] = {
    sizes.BranchOdd: r"another path for more than 8 ranges of sizes: .*n % 2.*sizes\.py",
    sizes.BranchOfBoth: r"batch\*seq > 64|seq",
    sizes.DataDependent: r"DataDependent cannot be traced: .*sizes\.py:\d+: if x\.sum\(\) > 0",
    sizes.DataSized: r"size that depends on data .*f32\[u0, 8\].* crosses a splitting op at sizes\.py:\d+",
    sizes.ItemAcross: r"a number read out of a tensor, .*sizes\.py:\d+ in forward: k = int\(",
    weights.StridedConstant: r"the constant plain has strides \(2,\)",
    sizes.ItemToOp: r"a number read out of a tensor, is used outside the piece",
    sizes.Never: r"at n=7: .*seven rows are too many",
    sizes.FixedSize: r"FixedSize cannot be traced: .*must match the size of tensor b \(11\).*sizes\.py:\d+: return x",
    memory.WrittenAttribute: r"writes into a tensor, f32\[8\], that is neither an input nor a parameter nor a buffer",
    calls.OpenArguments: r"takes input y in its \*\*kwargs",
}
"""What cannot be right for all promised shapes, and what the error says."""

ALL = [cls for module in (weights, memory, outputs, sizes, calls) for cls in building.zoo(module)]
RIGHT = [cls for cls in ALL if cls not in REFUSED]

COMPILED: list[type[Model]] = [
    memory.SliceWritten, memory.WrittenBuffers, calls.ActInside, calls.Turned, weights.Strided,
]  # fmt: skip
"""Few: each binary takes seconds."""


def name(cls: type[Model]) -> str:
    return cls.__name__


@pytest.mark.parametrize("cls", RIGHT, ids=name)
def test_a_program_equals_eager(cls: type[Model]) -> None:
    plan = plan_of(cls)
    check(cls, program_of(plan))
    proof, unproved = rehearse(plan.parts, plan.inputs, plan.weights, "cpu")
    assert {line.piece for line in proof} == set(plan.parts)
    assert not unproved


@pytest.mark.parametrize("cls", REFUSED, ids=name)
def test_an_error_names_the_construct_and_its_line(cls: type[Model]) -> None:
    with pytest.raises(TraceError, match=REFUSED[cls]) as caught:
        plan_of(cls)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("cls", COMPILED, ids=name)
def test_a_compiled_program_equals_eager(cls: type[Model], compiled: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(cls.spec(), sort_keys=False))
    result = pipeline.build(path, cache_dir=compiled, jobs=1)
    assert result.binaries["compiled"] == 0  # the fixture made them all, so tracing twice gave equal text
    check(cls, fxc.load(result.hash, cache_dir=compiled), 1e-4)


def test_an_op_without_result_is_called() -> None:
    """Once for each call of the program, as in eager."""
    program = program_of(plan_of(calls.Noted))
    noted.clear()
    program(torch.zeros(5, 8))
    assert noted == [5, 5]


def test_ranges_of_branches() -> None:
    """The range is split exactly where the model takes another path."""
    found = {
        cls: [program.range.label for program in plan_of(cls).manifest.programs]
        for cls in (
            sizes.BranchAbove,
            sizes.BranchOne,
            sizes.BranchSpecial,
            sizes.BranchOnPart,
            sizes.BranchCorner,
            sizes.BranchConstants,
            sizes.BranchTables,
        )
    }
    assert found == {
        sizes.BranchAbove: ["n=1..8", "n=9..64"],
        sizes.BranchOne: ["n=1", "n=2..64"],
        sizes.BranchSpecial: ["n=1..19", "n=20", "n=21..64"],
        sizes.BranchOnPart: ["n=1..9", "n=10..64"],
        sizes.BranchConstants: ["n=1..8", "n=9..64"],
        sizes.BranchTables: ["n=1", "n=2..64"],
        sizes.BranchCorner: ["batch=1,seq=1", "batch=1,seq=2..33", "batch=2..9,seq=1..33"],
    }


def test_one_graph_where_there_is_no_branch() -> None:
    for cls in (sizes.Arithmetic, sizes.Broadcasts, sizes.Halves, sizes.FromZero, sizes.Equal, sizes.Padded):
        assert len(plan_of(cls).manifest.programs) == 1, cls.__name__


def test_equal_layers_are_one_piece() -> None:
    manifest = plan_of(calls.EqualLayers).manifest
    names = [piece.name for piece in manifest.pieces["step_0"] if piece.kind == "compiled"]
    assert names == ["piece_0", "piece_1", "piece_1", "piece_1", "piece_2"]
