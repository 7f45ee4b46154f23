"""A model to one graph: example sizes, what export says when it cannot, names, roles, writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from fxc.graph_text import print_graph
from fxc.shapes import Range
from fxc.trace import Narrowed, _narrowed, hints, model_files, source_files, with_fake_weights
from fxc.traced import Traced
from tests.passes import pieces
from tests.test_cases import BOX, at, traced
from tests.zoo import calls, memory, outputs, sizes, weights
from tests.zoo.model import Model


@pytest.mark.parametrize(
    ("bounds", "avoid", "chosen"),
    [
        ((1, 64), set(), 37),
        ((1, 64), {37, 41}, 43),
        ((1, 37), set(), 31),
        ((1, 2), set(), 2),
        ((0, 1), set(), 1),
        ((5, 5), {5}, 5),
        ((8, 9), set(), 8),
        ((1000, 9000), {1000}, 1001),
    ],
)
def test_example_sizes(bounds: tuple[int, int], avoid: set[int], chosen: int) -> None:
    assert hints(at(*bounds), avoid) == {"n": chosen}


def test_example_sizes_of_two_dimensions_differ() -> None:
    assert hints(Range((("b", 1, 64), ("s", 1, 64), ("t", 1, 3))), {37}) == {"b": 41, "s": 43, "t": 2}


SAID = """Constraints violated (n)! For more information, run with TORCH_LOGS="+dynamic".
  - Not all values of n = L['x'].size()[0] in the specified range n <= 64 satisfy the generated guard {guard}
Suggested fixes:
  {fix}
"""


@pytest.mark.parametrize(
    ("guard", "fix", "part"),
    [
        ("9 <= L['x'].size()[0] and L['x'].size()[0] <= 64", "n = Dim('n', min=9, max=64)", at(9, 64)),
        ("L['x'].size()[0] <= 40", "n = Dim('n', max=40)", at(1, 40)),
        ("9 <= L['x'].size()[0]", "n = Dim('n', min=9)", at(9, 64)),
        ("10 <= L['x'].size()[0] and L['x'].size()[0] <= 64", "_n = Dim('_n', min=6)\n  n = 2*_n - 1", at(10, 64)),
    ],
)  # fmt: skip
def test_what_export_narrows(guard: str, fix: str, part: Range) -> None:
    found = _narrowed(ValueError(SAID.format(guard=guard, fix=fix)), BOX, {"n": 37})
    assert isinstance(found, Narrowed)
    assert found.part == part
    assert "L['x']" not in found.message
    assert found.message.startswith("Not all values of n in the specified range")


@pytest.mark.parametrize("fix", ["m = Dim('m', max=3)", "n = 2*_n", "n = Dim('n', min=40)"])
def test_what_is_no_narrowing(fix: str) -> None:
    """Another name, a multiple, or a part that does not hold the example."""
    text = SAID.format(guard="(L['x'].size()[0] % 2) == 0", fix=fix)
    assert _narrowed(ValueError(text), BOX, {"n": 37}) is None


def roles(graph: Traced) -> list[tuple[str, str]]:
    return [node.meta["role"] for node in graph.graph.find_nodes(op="placeholder") if node.users]


def test_tied_weights_have_one_name() -> None:
    assert sorted(roles(traced(weights.Tied))) == [("input", "ids"), ("weight", "embed.weight")]


def test_roles_of_buffers_and_constants() -> None:
    found = traced(weights.Buffers)
    assert set(roles(found)) == {
        ("input", "x"), ("weight", "scale"), ("constant", "table"), ("constant", "middle"), ("weight", "order"),
    }  # fmt: skip
    assert float(found.constants["middle"]) == 0.5


def test_inputs_may_be_named_as_anything() -> None:
    assert {name for role, name in roles(traced(weights.NamesCollide)) if role == "input"} == {
        "torch", "step", "pieces", "x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (memory.AddsToInput, {"x"}),
        (memory.IndexPut, {"cache"}),
        (memory.WrittenBuffers, {"count", "total"}),
        (memory.WritesSeveral, {"a", "b"}),
        (memory.UnboundViews, {"cache"}),
        (memory.TransposedWrite, {"x"}),
        (memory.OutArgument, {"out"}),
        (memory.ChunkWritten, set()),
        (calls.Turned, set()),
    ],
)
def test_what_is_written(cls: type[Model], names: set[str]) -> None:
    box = Range(tuple((name, *bounds) for name, bounds in cls.dims.items()))
    assert traced(cls, box).mutated == names


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x, y: (x.type_as(y).add_(1), x * 2)[1], {"x"}),
        (lambda x, y: (torch.einsum("ij->ji", x).add_(1), x * 2)[1], {"x"}),
        (lambda x, y: (torch.broadcast_tensors(x, y)[1].add_(1), x * 2)[1], {"y"}),
        (lambda x, y: (torch.ops.aten.unsafe_split(y, 2, 1)[0].add_(1), x * 2)[1], {"y"}),
    ],
)
def test_what_is_written_by_a_view_that_is_none_by_its_schema(function: Any, names: set[str]) -> None:
    assert pieces.traced(function, {"x": "float32[n, 4]", "y": "float32[n, 4]"}).mutated == names


def test_a_result_is_the_written_argument_only_where_the_schema_says_so() -> None:
    """write_both writes into `a` and returns another tensor."""
    text = print_graph(traced(memory.WritesSeveral).graph, "f")
    assert "zoo.write_all.default([b, mul], write_both)" in text


def test_copies_are_no_views() -> None:
    graph = traced(memory.MayCopy).graph
    views = {node.target for node in graph.nodes if "base" in node.meta}
    assert views == {torch.ops.aten.t.default}


def test_sizes_are_spelled_alike_in_layouts_and_numbers() -> None:
    box = Range(tuple((name, *bounds) for name, bounds in sizes.SeqBatch.dims.items()))
    graph = traced(sizes.SeqBatch, box).graph
    numbers = {node.meta["expr"] for node in graph.nodes if "expr" in node.meta}
    layouts = " ".join(node.meta["layout"] for node in graph.nodes if "layout" in node.meta)
    assert "alpha*zeta" in numbers
    assert "f32[alpha*zeta, 8]" in layouts


def test_no_training_nodes_are_left() -> None:
    text = print_graph(traced(calls.Dropout).graph, "f")
    assert "dropout" not in text
    assert "assert" not in print_graph(traced(sizes.Halves, at(2, 64)).graph, "f")


def test_contexts_are_inlined() -> None:
    assert {node.op for node in traced(calls.Contexts).graph.nodes} == {"placeholder", "call_function", "output"}


def test_structure_of_the_output() -> None:
    found = traced(outputs.Nested).output
    assert found[0][0]["none"] is None
    assert isinstance(found[0][0]["a"], fx.Node)
    assert found[1:4] == (2.5, "text", True)


def test_weights_take_no_memory_and_stay_tied() -> None:
    model = weights.Tied()
    with_fake_weights(model, "cpu")
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, nn.Parameter)
    buffers = with_fake_weights(weights.Buffers(), "cpu")
    assert float(buffers.get_buffer("middle")) == 0.5


def test_source_files() -> None:
    class Own(nn.Linear):
        pass

    assert model_files(Own(1, 1)) == {__file__}
    assert source_files(traced(calls.NoCut).graph) == {calls.__file__}
