"""Ranges, sizes, and which program serves what."""

from __future__ import annotations

import pytest

from fxc.errors import InputError
from fxc.shapes import Range, edge_points, general_ranges, select, size_range

N = Range((("n", 1, 64),))
TWO = Range((("batch", 1, 8), ("tokens", 3, 512)))


@pytest.mark.parametrize(
    ("box", "label", "is_size"),
    [
        (N, "n=1..64", False),
        (size_range(["n"], {"n": 8}), "n=8", True),
        (TWO, "batch=1..8,tokens=3..512", False),
        (size_range(["batch", "tokens"], {"tokens": 4, "batch": 2}), "batch=2,tokens=4", True),
        (Range(()), "static", True),
    ],
)
def test_label(box: Range, label: str, is_size: bool) -> None:
    assert (box.label, box.is_size) == (label, is_size)


def test_contains_both_ends() -> None:
    assert [N.contains({"n": n}) for n in (0, 1, 64, 65)] == [False, True, True, False]


def test_low_high_replace() -> None:
    assert (TWO.low(), TWO.high()) == ({"batch": 1, "tokens": 3}, {"batch": 8, "tokens": 512})
    assert TWO.replace("tokens", 5, 6).label == "batch=1..8,tokens=5..6"


@pytest.mark.parametrize(
    ("cuts", "labels"),
    [
        ([], ["n=1..512"]),
        ([256], ["n=1..256", "n=257..512"]),
        ([256, 16, 256], ["n=1..16", "n=17..256", "n=257..512"]),
        ([1], ["n=1", "n=2..512"]),
        ([512], ["n=1..512"]),
    ],
)
def test_general_ranges(cuts: list[int], labels: list[str]) -> None:
    assert [box.label for box in general_ranges({"n": (1, 512)}, [("n", cut) for cut in cuts])] == labels


def test_general_ranges_of_two_dimensions_are_all_combinations() -> None:
    boxes = general_ranges({"a": (1, 4), "b": (1, 9)}, [("a", 2), ("b", 5)])
    assert [box.label for box in boxes] == ["a=1..2,b=1..5", "a=1..2,b=6..9", "a=3..4,b=1..5", "a=3..4,b=6..9"]


def test_general_ranges_without_dimensions() -> None:
    assert general_ranges({}, []) == (Range(()),)


def test_edge_points() -> None:
    assert [p["n"] for p in edge_points(N)] == [1, 2, 64]
    assert [p["n"] for p in edge_points(N, [{"n": 8}, {"n": 99}, {"n": 1}])] == [1, 2, 64, 8]
    assert [p["n"] for p in edge_points(Range((("n", 0, 5),)))] == [0, 1, 2, 5]
    assert edge_points(TWO) == tuple({"batch": b, "tokens": t} for b in (1, 2, 8) for t in (3, 512))
    assert edge_points(Range(())) == ({},)


@pytest.mark.parametrize(("n", "index"), [(8, 2), (7, 0), (1, 0), (16, 0), (17, 1), (64, 3)])
def test_select_takes_the_size_else_the_first_range(n: int, index: int) -> None:
    ranges = [Range((("n", low, high),)) for low, high in ((1, 16), (17, 64), (8, 8), (64, 64))]
    assert select(ranges, {"n": n}) == index


def test_select_static() -> None:
    assert select([Range(())], {}) == 0


def test_select_out_of_bounds() -> None:
    with pytest.raises(InputError) as caught:
        select([N], {"n": 65})
    assert caught.value.message == "n = 65 is out of bounds: the program was built for 1 to 64"
    assert caught.value.hint == "build with other bounds for dims.n"


def test_select_in_a_gap() -> None:
    ranges = [size_range(["n"], {"n": n}) for n in (1, 8)]
    with pytest.raises(InputError, match="no program serves n=4"):
        select(ranges, {"n": 4})
