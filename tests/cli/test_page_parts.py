"""What a page is made of: sources that are read, lanes, repetitions."""

from __future__ import annotations

import pytest

from fxc.cli.page.fold import Repeated, fold, merge
from fxc.cli.page.lanes import WIDEST, draw
from fxc.cli.page.source import OWN, Graph, Op, Origin, graphs, origins
from tests.cli.pages import CODE, PIECES


@pytest.mark.parametrize(
    ("sequence", "told"),
    [
        ("", []),
        ("a", [(1, "a")]),
        ("aaaa", [(4, "a")]),
        ("axbxbxbxc", [(1, "a"), (3, "xb"), (1, "xc")]),
        ("abcabcd", [(2, "abc"), (1, "d")]),
        ("a" + "xbyc" * 32 + "d", [(1, "a"), (32, "xbyc"), (1, "d")]),
    ],
)
def test_fold(sequence: str, told: list[tuple[int, str]]) -> None:
    assert fold(list(sequence)) == [Repeated(times, tuple(unit)) for times, unit in told]


def test_names_that_differ_in_numbers() -> None:
    layers = [f"layers.{index}.w2" for index in range(32)]
    assert merge([*layers, "head", "head"]) == [("layers.{0..31}.w2", 32), ("head", 1)]
    assert merge(["a.1", "a.3"]) == [("a.{1,3}", 2)]
    assert merge(f"a.{index}" for index in range(0, 20, 2)) == [("a.{0,2,4,…,18}", 10)]
    assert merge(["a.0.b.1", "a.1.b.1"]) == [("a.{0..1}.b.1", 2)]


def test_a_printed_graph() -> None:
    found = graphs(PIECES)
    assert list(found) == ["piece_0", "piece_1"]
    assert found["piece_0"].inputs == (Op("in_0", "", "", "f32[n, 4]", ()), Op("in_1", "", "", "f32[4, 4]", ()))
    assert found["piece_0"].ops == (
        Op("sym_size", "sym_size.int", "in_0, 0", "", ("in_0",)),
        Op("linear", "linear", "in_0, in_1", "f32[n, 4]", ("in_0", "in_1")),
        Op("mul", "", "sym_size * 4", "", ("sym_size",)),
        Op("view", "view", "linear, [mul]", "f32[4*n]", ("linear", "mul")),
        Op("relu", "relu", "view, '</script>'", "f32[n, 4] strides [1, n]", ("view",)),
    )
    assert [op.is_size for op in found["piece_0"].ops] == [True, False, True, False, False]
    assert found["piece_0"].returns == ("relu",)
    assert found["piece_1"].returns == ()


@pytest.mark.parametrize("text", ["", "# the graph\n", "def f(", "\0", "x = 1"])
def test_no_graphs(text: str) -> None:
    assert graphs(text) == {}
    assert origins(text) == {}


def test_where_arguments_come_from() -> None:
    assert origins(CODE) == {
        "step_0": [
            (Origin("input", "x"), Origin("weight", "layers.0.weight")),
            (Origin("result", "zoo::mix"), Origin("weight", "layers.1.weight")),
            (Origin("result", "piece_1"), OWN),
        ]
    }


def test_lanes() -> None:
    """An input stands before its first reader; what is read for the last time gives its lane to the result."""
    drawing = draw(graphs(PIECES)["piece_0"])
    told = [(row.op.name, row.kind, row.lane, row.reads) for row in drawing.rows]
    assert told == [
        ("in_0", "input", 0, ()),
        ("sym_size", "size", 1, (0,)),
        ("in_1", "input", 2, ()),
        ("linear", "call", 0, (0, 2)),
        ("mul", "size", 1, (1,)),
        ("view", "call", 0, (3, 4)),
        ("relu", "call", 0, (5,)),
        ("return", "output", 0, (6,)),
    ]
    assert drawing.width == 39
    assert dict(drawing.lines)[3] == "M6.5 3.5V5.5"
    assert dict(drawing.lines)[2] == "M32.5 2.5V2.5M32.5 2.5C32.5 3.1 6.5 2.9 6.5 3.5"


def test_many_lanes_move_together() -> None:
    inputs = tuple(Op(f"in_{index}", "", "", "f32[]", ()) for index in range(500))
    names = tuple(op.name for op in inputs)
    drawing = draw(Graph(inputs, (Op("cat", "cat", "", "f32[500]", names),), ("cat",)))
    assert drawing.width == WIDEST
    assert len(drawing.rows) == 502
    assert max(drawing.dots) <= WIDEST


def test_a_value_that_nobody_reads() -> None:
    drawing = draw(graphs(PIECES)["piece_1"])
    assert [row.op.name for row in drawing.rows] == ["in_1", "in_0", "copy_"]
    assert [start for start, _ in drawing.lines] == [0, 1]
