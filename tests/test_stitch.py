"""The text of transformed_code.py."""

from __future__ import annotations

import ast
import collections
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fxc import pipeline
from fxc.cache import Artifact, key
from fxc.runtime.loader import _execute, load
from fxc.stitch import unique_pieces
from tests.building import check, make, plan_of, program_of, spec_of, text_of, zoo
from tests.zoo import calls, memory, outputs, sizes, weights
from tests.zoo.model import Model


def test_transformed_code(golden: Callable[[str, str], None]) -> None:
    golden("transformed_code.txt", text_of(plan_of(memory.ViewOfInput, level=1)))


def test_transformed_code_without_compiling(golden: Callable[[str, str], None]) -> None:
    golden("transformed_code_level_0.txt", text_of(plan_of(sizes.BranchAbove)))


def test_computation_graph(golden: Callable[[str, str], None]) -> None:
    text = plan_of(sizes.BatchSeq).files["computation_graph.py"].decode()
    golden("computation_graph.txt", re.sub(r"(\.py):\d+", r"\1:0", text))  # edits above the model are no change


def test_computation_graph_runs_when_pasted() -> None:
    text = plan_of(memory.IndexPut).files["computation_graph.py"].decode()
    functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    namespace: dict[str, object] = {}
    exec(text, namespace)
    assert functions == ["step_0"]
    assert callable(namespace["step_0"])


@pytest.mark.parametrize("level", [0, 1])
def test_pieces_are_those_that_are_compiled(level: int) -> None:
    plan = plan_of(calls.EqualLayers, level=level)
    text = plan.files["pieces.py"].decode()
    functions = {
        name: f"def piece({rest}" for name, rest in re.findall(r"^def (\w+)\((.*?^    return .*?\n)", text, re.M | re.S)
    }
    assert {name: key.digest(source) for name, source in functions.items()} == {
        piece.name: piece.unique for piece in plan.manifest.pieces["step_0"] if piece.kind == "compiled"
    }
    namespace: dict[str, object] = {}
    exec(text, namespace)
    assert set(functions) < set(namespace)


def body(cls: type[Model]) -> list[str]:
    """Lines of the step, without comments."""
    text = text_of(plan_of(cls, level=1))
    lines = text[text.index("    def step(") : text.index("    return step")].splitlines()[1:]
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def test_each_tensor_is_deleted_after_its_last_use() -> None:
    for cls in (calls.EqualLayers, calls.ChunksCross, memory.ChunkWritten, memory.ViewOfInput, calls.TupleLater):
        lines = body(cls)
        for index, line in enumerate(lines):
            if line.startswith("del "):
                for name in line.removeprefix("del ").split(", "):
                    assert not any(re.search(rf"\b{name}\b", later) for later in lines[index + 1 :]), (cls, name)
    assert any(line.startswith("del ") for line in body(calls.EqualLayers))


def test_no_look_ups_inside_the_step() -> None:
    for cls in (calls.Options, memory.ViewOfInput, sizes.SizeArguments):
        assert not [line for line in body(cls) if "torch.ops" in line]


def test_new_tensors_are_made_on_the_device_that_a_loader_sets() -> None:
    """Neither the piece's own text, its identity, nor a program of another device knows of it."""
    plan = plan_of(calls.MadeOnDevice)
    text = text_of(plan)
    assert "    device_1 = DEVICE\n" in text  # `device` is an input
    assert [line for line in body(calls.MadeOnDevice) if "zoo_made(" in line] == [
        "made = zoo_made(x, device=device_1)",
        "made_1 = zoo_made(add, device=device_1)",
    ]
    pieces = [call.piece.text for call in unique_pieces(plan.parts.values()).values()]
    assert sum(piece.count("device=torch.device('cpu')") for piece in pieces) == 3
    assert (text.count("torch.device("), text.count("device=DEVICE")) == (1, 3)

    namespace: dict[str, Any] = {}
    exec(text, namespace)
    assert namespace["DEVICE"] == torch.device("cpu")
    namespace["DEVICE"] = torch.device("meta")
    made = namespace["step_0"](namespace["PIECES"]["step_0"], ())
    given = torch.ones(4, 8, device="meta")
    assert [result.device.type for result in made(given, given)] == ["meta", "meta"]


def test_an_artifact_is_loaded_onto_a_device(tmp_path: Path) -> None:
    spec = calls.MadeOnDevice.spec() | {"compile": {"level": 0}}
    (tmp_path / "model.yaml").write_text(json.dumps(spec))
    built = pipeline.build(tmp_path / "model.yaml", cache_dir=tmp_path)
    program = load(built.path)
    program(torch.ones(4, 8), torch.ones(4, 8))
    artifact = Artifact.open(Path(built.path))
    assert _execute(artifact, "rank_0_0/transformed_code.py", torch.device("meta"))["DEVICE"] == torch.device("meta")
    assert program._factories[0].make.__globals__["DEVICE"] == program.device


def test_a_dimension_is_taken_only_where_it_is_used() -> None:
    assert "batch = x.shape[0]" in body(sizes.SizeArguments)
    assert not [line for line in body(calls.EqualLayers) if ".shape" in line]


def test_weights_are_handed_over_once() -> None:
    namespace: dict[str, object] = {}
    exec(text_of(plan_of(weights.NamesCollide)), namespace)
    names = namespace["WEIGHTS"]
    assert isinstance(names, tuple)
    assert len(names) == len(set(names)) == 17
    assert {"a.b", "a_b", "x", "lin.weight", "lin_weight", "piece_0", "class"} <= set(names)


def test_an_output_of_named_tuples_keeps_its_fields() -> None:
    program = program_of(plan_of(outputs.Named))
    pair = program(torch.ones(4, 8))["pair"]
    assert (type(pair).__name__, pair._fields) == ("Pair", ("first", "second"))


class Narrow(NamedTuple):
    first: Tensor


class Wide(NamedTuple):
    first: Tensor
    second: Tensor


Wide.__name__ = "Narrow"
Renamed = collections.namedtuple("Renamed", ["a", "def", "a"], rename=True)
NAMES = ("step_0", "WEIGHTS", "PIECES", "DEVICE", "torch", "collections", "math", "inf", "x", "mix", "piece_0", "list")
CLASSES = [collections.namedtuple(name, ["first"]) for name in NAMES]


class Alike(Model):
    """Two classes of one name, and fields that no Python text can name."""

    def forward(self, x: Tensor) -> Any:
        y = torch.ops.zoo.mix(x)
        return [Narrow(x + 1), Wide(x + 2, y), {"a": Renamed(y, x.shape[0], Narrow(y))}]


class NamedAsText(Model):
    """Classes with names that the program's text uses."""

    def forward(self, x: Tensor) -> Any:
        y = torch.ops.zoo.mix(x)
        return [kind(y + index) for index, kind in enumerate(CLASSES)], torch.zeros(2) if x.shape[0] > 8 else None


@pytest.mark.parametrize("cls", [Alike, NamedAsText], ids=lambda cls: cls.__name__)
def test_classes_of_named_tuples_keep_name_and_fields(cls: type[Model]) -> None:
    plan = plan_of(cls)
    check(cls, program_of(plan))
    assert text_of(plan) == text_of(plan_of(cls))


def test_a_class_of_named_tuples_is_called_as_it_is_where_nothing_else_is() -> None:
    text = text_of(plan_of(outputs.Named))
    assert "\nPair = collections.namedtuple('Pair', ['first', 'second'], rename=True)\n" in text
    assert "'pair': Pair(mix, Pair(" in text


def test_a_program_is_independent_of_the_number_of_its_calls() -> None:
    program = program_of(plan_of(memory.WrittenBuffers)).bind(make(memory.WrittenBuffers))
    first, second = program(torch.ones(1, 8)), program(torch.ones(1, 8))
    assert torch.equal(first, torch.full((1, 8), 0.5 + 1))
    assert torch.equal(second, torch.full((1, 8), 0.5 * 2 + 2))


@pytest.mark.parametrize("cls", zoo(calls)[:3] + zoo(outputs)[:3], ids=lambda cls: cls.__name__)
def test_the_text_does_not_depend_on_the_process(cls: type[Model]) -> None:
    assert text_of(plan_of(cls)) == text_of(plan_of(cls))


def test_a_new_layout_is_made_where_an_op_breaks_its_promise() -> None:
    assert "mix = mix.contiguous()" in body(calls.ChunksCross)
    turned = [line for line in body(calls.Turned) if "stride()" in line]
    assert turned == ["if turned.stride() != (1, n,):"]
    assert spec_of(calls.Turned).partition.splitting_ops == ("zoo::mix", "zoo::turned")
