"""A graph as text and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from fxc.errors import TraceError
from fxc.graph_text import layout, parse_graph, parse_layout, print_graph, rename, source_line, target_text, value_text
from fxc.stitch import unique_pieces
from tests.building import plan_of, zoo
from tests.zoo import calls, memory, sizes

EXAMPLE = """\
def piece(in_0: "f32[n, 256]", in_1: "f32[256, 512] strides [1, 256]"):
    sym_size = torch.ops.aten.sym_size.int(in_0, 0)
    floordiv = sym_size // 2
    mm = torch.ops.aten.mm.default(in_0, in_1)
    chunk = torch.ops.aten.chunk.default(mm, 2, -1)
    getitem = chunk[0]
    slice_0 = torch.ops.aten.slice.Tensor(getitem, 0, floordiv, 9223372036854775807)
    full = torch.ops.aten.full.default([sym_size, 2], float('-inf'), dtype=torch.bfloat16, device=torch.device('cpu'))
    ceil = math.ceil(2.5)
    return (slice_0, full)
"""


def test_text_comes_back() -> None:
    graph, layouts = parse_graph(EXAMPLE)
    for node, text in zip(graph.nodes, layouts, strict=False):
        node.meta["layout"] = text
    assert print_graph(graph, "piece") == EXAMPLE
    assert layouts == ["f32[n, 256]", "f32[256, 512] strides [1, 256]"]


def test_what_comes_back_runs() -> None:
    graph, _ = parse_graph(EXAMPLE)
    x, w = torch.randn(4, 256), torch.randn(512, 256).t()
    rows, full = fx.GraphModule({}, graph)(x, w)
    assert torch.equal(rows, (x @ w)[2:, :256])
    assert (full.shape, full.dtype, full.isinf().all()) == ((4, 2), torch.bfloat16, True)


@pytest.mark.parametrize("cls", [cls for module in (calls, memory, sizes) for cls in zoo(module)][::6])
def test_every_piece_comes_back(cls: Any) -> None:
    """Each piece of a real model, and names that are given again are the same names."""
    try:
        plan = plan_of(cls)
    except TraceError:
        return
    for call in unique_pieces(plan.parts.values()).values():
        text = call.piece.text
        graph, layouts = parse_graph(text)
        assert [node.meta["layout"] for node in graph.find_nodes(op="placeholder")] == layouts
        rename(graph)
        assert print_graph(graph, "piece") == text


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -3, 1.5, -0.0, 1e-300, 2**63, math.inf, -math.inf, "a 'b' \"c\"\\\n", [], [1, [2.0]], (), (1,),
        (1, (2,)), {"a": [1]}, slice(None, 2, None), torch.float8_e4m3fn, torch.strided, torch.channels_last,
        torch.device("cpu"), 1 + 2j, -1.5 - 0.5j, 2j, [None, True],
    ],
)  # fmt: skip
def test_constants_come_back(value: Any) -> None:
    text = f"def f():\n    op = torch.add({value_text(value)})\n    return (op,)\n"
    (found,) = next(iter(parse_graph(text)[0].nodes)).args
    assert repr(found) == repr(value)


def test_nan_comes_back() -> None:
    (found,) = next(iter(parse_graph("def f():\n    op = torch.add(float('nan'))\n    return ()\n")[0].nodes)).args
    assert isinstance(found, float)
    assert math.isnan(found)


def test_a_device_has_no_index() -> None:
    assert value_text(torch.device("cuda:3")) == "torch.device('cuda')"


def test_what_cannot_be_written() -> None:
    with pytest.raises(TraceError, match="argument of type Tensor"):
        value_text(torch.ones(1))
    with pytest.raises(TraceError, match=r"calls .*<lambda>"):
        target_text(lambda x: x)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 3), "f32[2, 3]"),
        (torch.zeros(()), "f32[]"),
        (torch.zeros(3, 2).t(), "f32[2, 3] strides [1, 2]"),
        (torch.zeros(1, 3).expand(2, 3), "f32[2, 3] strides [0, 1]"),
        (torch.zeros(3, 1).t(), "f32[1, 3]"),
        (torch.zeros(4, dtype=torch.bool)[::2], "b8[2] strides [2]"),
        (torch.zeros(0, 3), "f32[0, 3]"),
        (torch.zeros(2, 0, 3), "f32[2, 0, 3]"),
        (torch.zeros(1, 4, 2, 2).to(memory_format=torch.channels_last), "f32[1, 4, 2, 2] strides [16, 1, 8, 4]"),
    ],
)
def test_layout(tensor: torch.Tensor, text: str) -> None:
    assert layout(tensor) == text


def test_parse_layout() -> None:
    assert parse_layout("bf16[max(1, n), 2*n // 3, 8] strides [8*max(1, n), 8, 1]") == (
        torch.bfloat16, ["max(1, n)", "2*n // 3", "8"], ["8*max(1, n)", "8", "1"],
    )  # fmt: skip
    assert parse_layout("i64[]") == (torch.int64, [], None)
    with pytest.raises(ValueError, match="not a layout"):
        parse_layout("float32(3)")


def test_names_are_canonical() -> None:
    graph = fx.Graph()
    x = graph.placeholder("a_long_name")
    x.meta["layout"] = "f32[2]"
    nodes = [graph.call_function(torch.ops.aten.add.Tensor, (x, i)) for i in range(2)]
    nodes.append(graph.call_function(torch.ops.aten.sum.default, (nodes[1],)))
    nodes.append(graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)))
    graph.output(tuple(nodes))
    rename(graph)
    assert [node.name for node in graph.nodes][:-1] == ["in_0", "add", "add_1", "sum_0", "add_2"]


def test_source_line_is_the_models() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = (
        '  File "/home/me/net.py", line 7, in forward\n    return self.lin(x)\n'
        f'  File "{Path(torch.__file__).parent}/nn/linear.py", line 134, in forward\n    return F.linear(x)\n'
    )
    assert source_line(node) == "net.py:7 in forward: return self.lin(x)"
