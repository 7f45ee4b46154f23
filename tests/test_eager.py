"""A traced graph read back from its file, and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxc import eager
from fxc.bench import tensors
from fxc.cache import Cache
from fxc.errors import DamagedError, RunError
from fxc.graph_run import Role
from fxc.plan import Plan
from fxc.random_inputs import example_inputs
from tests.building import make, plan_of, program_of
from tests.zoo import calls, memory, sizes, weights
from tests.zoo.model import Model

CPU = torch.device("cpu")


def graphs(folder: Path, plan: Plan, text: str | None = None) -> dict[str, eager.Graph]:
    """Of an artifact, with `text` in place of its graph."""
    files: dict[str, bytes | Path] = {**plan.files}
    if text is not None:
        files[eager.FILE] = text.encode()
    return eager.graphs(Cache.open(folder).publish(plan.manifest, "rank_0_0", files, ()))


@pytest.mark.parametrize(
    "cls", [calls.EqualLayers, weights.NamesCollide, weights.Tied, memory.IndexPut, sizes.BatchSeq]
)
def test_it_gives_what_the_program_gives(tmp_path: Path, cls: type[Model]) -> None:
    plan = plan_of(cls)
    program = program_of(plan)
    model = make(cls)
    program.bind(model)
    found = graphs(tmp_path, plan)
    assert list(found) == list(plan.parts)
    state = model.state_dict()
    held: dict[Role, torch.Tensor] = {("weight", weight.name): state[weight.name] for weight in plan.manifest.weights}
    held |= {("constant", name): tensor for name, tensor in plan.parts["step_0"].traced.constants.items()}
    module = found["step_0"].module(held, CPU)
    point = dict(zip(cls.dims, cls.calls[0], strict=True))
    inputs = example_inputs(plan.manifest.spec.inputs, point, "cpu", torch.Generator().manual_seed(1))
    theirs = {name: tensor.clone() for name, tensor in inputs.items()}
    expected, results = tensors(program(**inputs)), tensors(module(**theirs))
    assert len(results) == len(expected) > 0
    for have, want in zip(results, expected, strict=True):
        torch.testing.assert_close(have, want)
    for name, tensor in inputs.items():
        torch.testing.assert_close(theirs[name], tensor)


LOOKS_UP = """
def step_0(p_a: "f32[9, 4]", p_b: "f32[9, 4]", p_unused: "f32[1]", x: "i64[n]"):
    embedding = torch.ops.aten.embedding.default(p_a, x)
    embedding_1 = torch.ops.aten.embedding.default(p_a, x)
    embedding_2 = torch.ops.aten.embedding.default(p_b, x)
    linear = torch.ops.aten.linear.default(embedding, p_b)
    bernoulli = torch.ops.aten.bernoulli.default(linear)
    return (bernoulli, embedding_1, embedding_2)

PLACEHOLDERS = {"step_0": {"p_a": ("weight", "a"), "p_b": ("weight", "b"), "p_unused": ("weight", "c"), "x": ("input", "x")}}
"""


def test_weights_of_which_rows_are_looked_up(tmp_path: Path) -> None:
    graph = graphs(tmp_path, plan_of(weights.Tied), LOOKS_UP)["step_0"]
    assert graph.gathered() == {"a": 2}
    assert graph.draws
    module = graph.module({("weight", "a"): torch.rand(9, 4), ("weight", "b"): torch.rand(9, 4)}, CPU)
    assert [len(list(kind)) for kind in (module.parameters(), module.buffers())] == [2, 0]
    assert module.order == ["x"]


def test_a_file_without_roles(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"computation_graph.py does not say which weight is which") as caught:
        graphs(tmp_path, plan_of(weights.Tied), LOOKS_UP.partition("PLACEHOLDERS")[0])
    assert caught.value.hint == "build it again: fxc build --force"


@pytest.mark.parametrize("change", [("aten.linear.default", "aten.nothing.default"), ("(linear)", "(lin")])
def test_a_file_that_cannot_be_read(tmp_path: Path, change: tuple[str, str]) -> None:
    with pytest.raises(DamagedError, match="computation_graph.py cannot be read back"):
        graphs(tmp_path, plan_of(weights.Tied), LOOKS_UP.replace(*change))
