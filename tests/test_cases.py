"""Covering a box of shapes with graphs, and comparing two graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fxc.cases import _cut, _suspects, cover, same
from fxc.errors import TraceError
from fxc.models import instantiate, resolve
from fxc.shapes import Range
from fxc.trace import Narrowed, capture, with_fake_weights
from fxc.traced import Condition, Traced
from tests.building import HERE, spec_of
from tests.zoo import calls, outputs, sizes
from tests.zoo.model import Model

BOX = Range((("n", 1, 64),))


def traced(cls: type[Model], box: Range = BOX) -> Traced:
    spec = spec_of(cls)
    return capture(with_fake_weights(instantiate(resolve(spec, HERE)), "cpu"), spec.inputs, box, "cpu")


def at(low: int, high: int) -> Range:
    return Range((("n", low, high),))


@pytest.mark.parametrize(
    ("part", "labels"),
    [
        ({"b": (1, 9), "s": (1, 9)}, ["b=1..9,s=1..9"]),
        ({"b": (3, 3), "s": (1, 9)}, ["b=1..2,s=1..9", "b=4..9,s=1..9", "b=3,s=1..9"]),
        ({"b": (1, 4), "s": (9, 9)}, ["b=5..9,s=1..9", "b=1..4,s=1..8", "b=1..4,s=9"]),
    ],
)
def test_what_is_left_around_a_part(part: dict[str, tuple[int, int]], labels: list[str]) -> None:
    whole = Range((("b", 1, 9), ("s", 1, 9)))
    boxes = _cut(whole, Range(tuple((name, *bounds) for name, bounds in part.items())))
    assert [box.label for box in boxes] == labels
    points = [{"b": b, "s": s} for b in range(1, 10) for s in range(1, 10)]
    assert all(sum(box.contains(point) for box in boxes) == 1 for point in points)


def test_sizes_0_and_1_are_suspects_in_all_combinations() -> None:
    graph = Traced(Range((("b", 0, 9), ("s", 1, 9))), torch.fx.Graph(), None)
    labels = [spot.label for spot, _ in _suspects(graph, [])]
    assert labels == ["b=0..9,s=1", "b=0,s=1..9", "b=0,s=1", "b=1,s=1..9", "b=1,s=1"]


def test_broken_conditions_are_suspects() -> None:
    graph = Traced(at(2, 40), torch.fx.Graph(), None, conditions=[Condition("n != 20", lambda s: s["n"] != 20)])
    assert list(_suspects(graph, [])) == [(at(20, 20), "n != 20 does not hold at n=20")]


def test_conditions_are_asked_everywhere() -> None:
    """Of one dimension and of several, wherever in the range they break; the first and the last such point are told."""
    far = Condition("n % 30000 != 0", lambda sizes: sizes["n"] % 30000 != 0)
    graph = Traced(at(2, 100_000), torch.fx.Graph(), None, conditions=[far])
    assert [spot for spot, _ in _suspects(graph, [])] == [at(30000, 30000), at(90000, 90000)]
    inner = Condition("s + b != 300", lambda sizes: sizes["s"] + sizes["b"] != 300)
    box = Range((("b", 2, 32), ("s", 2, 512)))
    labels = [spot.label for spot, _ in _suspects(Traced(box, torch.fx.Graph(), None, conditions=[inner]), [])]
    assert labels == ["b=2,s=298", "b=32,s=268"]


def test_conditions_that_take_single_numbers_only() -> None:
    """They are asked near the edges, next to the numbers that they name, and at the given points."""

    def holds(sizes: Mapping[str, Any]) -> bool:
        return not (sizes["n"] == 700 or sizes["n"] > 99_995 or sizes["n"] == 60_000)

    graph = Traced(at(2, 100_000), torch.fx.Graph(), None, conditions=[Condition("n != 700 and ...", holds)])
    values = [spot.low()["n"] for spot, _ in _suspects(graph, [{"n": 60_000}, {"n": 70_000}])]
    assert values == [700, *range(99_996, 100_001), 60_000]


def test_a_condition_on_data_says_nothing_about_sizes() -> None:
    def holds(sizes: object) -> bool:
        raise KeyError("u0")

    graph = Traced(at(2, 9), torch.fx.Graph(), None, conditions=[Condition("u0 > 1", holds)])
    assert list(_suspects(graph, [])) == []


def test_same_graphs() -> None:
    for cls in (sizes.Arithmetic, sizes.Arange, calls.Random, calls.Complex, outputs.OnlySize):
        assert same(traced(cls), traced(cls, at(1, 1))), cls.__name__
        assert same(traced(cls), traced(cls, at(7, 7))), cls.__name__


@pytest.mark.parametrize("cls", [sizes.BranchOne, sizes.Squeezed])
def test_other_numbers_and_other_ranks_are_other_graphs(cls: type[Model]) -> None:
    assert not same(traced(cls), traced(cls, at(1, 1)))
    assert same(traced(cls), traced(cls, at(5, 5)))


def test_a_graph_that_fails_there_is_another() -> None:
    assert not same(traced(sizes.EmptySlice, at(4, 64)), traced(sizes.EmptySlice, at(2, 2)))


def test_cover_follows_what_export_says() -> None:
    graph = traced(calls.NoCut)

    def trace(box: Range) -> Traced:
        if box.high()["n"] > 10 >= box.low()["n"]:
            raise Narrowed(box.replace("n", 11, box.high()["n"]), "n > 10")
        return Traced(box, graph.graph, graph.output)

    assert [found.range.label for found in cover(BOX, trace, [])] == ["n=1..10", "n=11..64"]


def test_cover_gives_up() -> None:
    graph = traced(calls.NoCut)

    def trace(box: Range) -> Traced:
        if box.is_size:
            return Traced(box, graph.graph, graph.output)
        raise Narrowed(box.replace("n", box.low()["n"], box.low()["n"]), "n is special in net.py:3")

    with pytest.raises(TraceError, match=r"more than 8 ranges of sizes: n is special in net.py:3"):
        cover(BOX, trace, [])


def test_an_error_at_one_size_names_it() -> None:
    graph = traced(calls.NoCut)

    def trace(box: Range) -> Traced:
        if box.is_size:
            raise TraceError("assert n > 1 at net.py:3")
        return Traced(box, graph.graph, graph.output)

    with pytest.raises(TraceError, match=r"at n=1: assert n > 1 at net.py:3"):
        cover(BOX, trace, [])
