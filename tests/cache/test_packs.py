from __future__ import annotations

import pytest

from fxc.cache import packs
from fxc.cache.packs import Place, Span
from fxc.errors import DamagedError
from fxc.manifest import File


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK", 100)


def file(name: str, size: int) -> File:
    return File(bytes=size, sha256=name)


A, B, C, D, EMPTY = file("a", 40), file("b", 50), file("c", 30), file("d", 10), file("e", 0)


def test_what_is_small() -> None:
    assert [packs.is_small(file("x", size)) for size in (0, 50, 51)] == [True, True, False]


def test_groups() -> None:
    assert [*packs.groups([A, B, C, EMPTY, D])] == [[A, B], [C, EMPTY, D]]
    assert [*packs.groups([])] == []
    assert [*packs.groups([file("x", 100), D])] == [[file("x", 100)], [D]]


def test_places() -> None:
    assert packs.places("p", [A, EMPTY, B]) == {
        "a": Place("p", 0, 90),
        "e": Place("p", 40, 90),
        "b": Place("p", 40, 90),
    }


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([A, B, C, D], [Span("p", 0, (A, B)), Span("q", 0, (C, D))]),
        ([D, B, A], [Span("p", 0, (A, B)), Span("q", 30, (D,))]),
        ([A], [Span("p", 0, (A,))]),
        ([], []),
    ],
)
def test_one_request_for_what_lies_together(wanted: list[File], expected: list[Span]) -> None:
    assert packs.spans(wanted, {**packs.places("p", [A, B]), **packs.places("q", [C, D])}) == expected


def test_what_lies_between_does_not_travel() -> None:
    where = packs.places("p", [A, C, EMPTY, D])
    assert packs.spans([D, A], where) == [Span("p", 0, (A,)), Span("p", 70, (D,))]
    (one,) = packs.spans([EMPTY, D, C], where)
    assert (one.start, one.end, one.files) == (40, 80, (C, EMPTY, D))


def test_there_and_back() -> None:
    where = packs.places("p", [A, B])
    data = packs.encode(where)
    assert packs.decode(data, "record") == where
    for damaged in (b"", data[:-5], data.replace(b'"start": 40', b'"start": 41')):
        with pytest.raises(DamagedError, match="record is damaged"):
            packs.decode(damaged, "record")
