"""Where a graph is cut, what crosses the cuts, and the text of the pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fxc.errors import SpecError, TraceError
from fxc.partition import Eager, Partition, check_splitting_ops, partition
from fxc.region import Call, _words
from fxc.shapes import Range
from tests.test_cases import traced
from tests.zoo import calls, memory, sizes, weights
from tests.zoo.model import Model


def cut(cls: type[Model]) -> Partition:
    return partition(traced(cls, Range(tuple((name, *bounds) for name, bounds in cls.dims.items()))), cls.split)


def kinds(part: Partition) -> str:
    return "".join("c" if isinstance(statement, Call) else "e" for statement in part.statements)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (calls.NoCut, "c"),
        (calls.CutFirstAndLast, "ece"),
        (calls.CutsInARow, "eee"),
        (calls.ChunksCross, "cecec"),
        (calls.OnlyViewBetween, "eeeeeee"),  # views alone are not worth a binary
        (memory.NoResult, "c"),
        (memory.UnboundViews, "eeec"),  # ops that write are cuts of their own
        (memory.CloneThenWrite, "ceeeec"),  # and copies that such an op relies on
        (calls.ActInside, "cec"),  # an op that only computes stays inside
    ],
)
def test_where_the_graph_is_cut(cls: type[Model], expected: str) -> None:
    assert kinds(cut(cls)) == expected


def test_every_overload_or_one() -> None:
    graph = traced(calls.ActInside)
    assert kinds(partition(graph, ["zoo::act.default"])).count("e") == 1
    assert kinds(partition(graph, ["zoo::act", "zoo::mix"])).count("e") == 2
    assert kinds(partition(graph, ["zoo::act.other"])).count("e") == 0


@pytest.mark.parametrize("name", ["zoo::mixed", "nowhere::mix", "aten::add.Nothing", "zoo::"])
def test_a_splitting_op_must_exist(name: str) -> None:
    with pytest.raises(SpecError, match=f"partition.splitting_ops: '{name}' is no registered op"):
        check_splitting_ops([name])


def test_splitting_ops_that_exist() -> None:
    check_splitting_ops(["zoo::mix", "aten::add", "aten::add.Tensor"])


@pytest.mark.parametrize("module", [calls, memory, sizes, weights])
def test_only_tensors_cross(module: object) -> None:
    """Of all models: what goes in and out of pieces has a layout, and each result is used somewhere."""
    from tests.building import zoo

    for cls in zoo(module)[::3]:  # type: ignore[arg-type]
        try:
            part = cut(cls)
        except Exception:  # branches and errors are tested elsewhere
            continue
        for call in part.calls:
            assert all(node.meta["layout"] for node in [*call.args, *call.results]), cls.__name__
            assert len(set(call.args)) == len(call.args), cls.__name__
            assert len(set(call.results)) == len(call.results), cls.__name__


def test_equal_layers_are_equal_pieces() -> None:
    texts = [call.piece.text for call in cut(calls.EqualLayers).calls]
    assert len(texts) == 5
    assert len(set(texts)) == 3


def test_a_piece_holds_the_dimensions_it_depends_on() -> None:
    assert [call.piece.dims for call in cut(sizes.BatchSeq).calls] == [
        ("batch", "seq"),
        ("batch", "seq"),
        ("batch", "seq"),
    ]
    assert cut(calls.NoCut).calls[0].piece.dims == ("n",)
    assert cut(sizes.Static).calls[0].piece.dims == ()


def test_sizes_are_computed_again() -> None:
    """A product alone does not give its factors: a model input that has them is passed along."""
    last = cut(sizes.ProductOnly).calls[-1]
    assert [node.name for node in last.args].count("x") == 1
    assert "sym_size.int" in last.piece.text


def test_views_of_written_tensors_are_made_again() -> None:
    part = cut(memory.ViewOfIntermediate)
    assert [node.name for call in part.calls for node in call.results].count("linear") == 1
    assert all("slice" not in node.name for call in part.calls for node in call.results)


def test_a_view_for_an_eager_op_is_made_before_it() -> None:
    eager = [s for s in cut(memory.WritesListOfViews).statements if isinstance(s, Eager)]
    assert [view.name for view in eager[0].views] == ["select", "select_1"]


def test_facts_of_a_piece() -> None:
    act = cut(calls.ActInside).calls[0].piece
    assert act.custom_ops == ("zoo::act(Tensor x) -> Tensor",)
    assert (act.random, act.ops) == (False, 3)
    assert cut(calls.Random).calls[0].piece.random
    assert [cut(cls).calls[0].piece.random for cls in (calls.Attends, calls.AttendsWithDropout)] == [False, True]


@pytest.mark.parametrize("cls", [sizes.DataSized, sizes.ItemAcross])
def test_data_dependent_numbers_do_not_cross(cls: type[Model]) -> None:
    with pytest.raises(TraceError, match=r"sizes\.py:"):
        cut(cls)


def test_words() -> None:
    assert _words("2*batch + max(1, seq_2//3) - math.floor(x1)") == {"batch", "max", "seq_2", "math", "x1"}


def test_piece_text(golden: Callable[[str, str], None]) -> None:
    golden("piece.txt", cut(sizes.BatchSeq).calls[-1].piece.text)
