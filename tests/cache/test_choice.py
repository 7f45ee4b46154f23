"""Which artifacts go, without any file."""

from __future__ import annotations

from typing import Any

import pytest

from fxc.cache.choice import Entry, Rules, choose

from .conftest import make_manifest

NOW = 1000.0


def entry(name: str, used: float, files: dict[int, int], in_use: bool = False) -> Entry:
    return Entry(name, make_manifest(name), used, files, in_use)


ENTRIES = [
    entry("d", 990, {40: 10}),
    entry("a", 100, {10: 10, 1: 100}),
    entry("c", 800, {30: 10, 2: 100}),
    entry("b", 500, {20: 10, 1: 100}),
]
"""By age a, b, c, d; a and b share a file of 100 bytes. 240 bytes altogether."""


def gone(entries: list[Entry] = ENTRIES, **rules: Any) -> list[str]:
    return [removal.hash for removal in choose(entries, Rules(**rules), NOW).removals]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, ""),
        ({"older_than": 300}, "ab"),
        ({"older_than": 500}, "a"),  # b: not longer ago than that
        ({"older_than": 0}, "abcd"),
        ({"keep_latest": 4}, ""),
        ({"keep_latest": 1}, "abc"),
        ({"keep_latest": 0}, "abcd"),
        ({"keep_latest": 9}, ""),
        ({"keep_latest": 3, "older_than": 0}, "a"),
        ({"keep_latest": 3, "older_than": 950}, ""),
        ({"max_bytes": 240}, ""),
        ({"max_bytes": 239}, "a"),
        ({"max_bytes": 229}, "ab"),
        ({"max_bytes": 10}, "abc"),
        ({"max_bytes": 0}, "abcd"),
        ({"max_bytes": 0, "keep_latest": 2}, "ab"),
        ({"max_bytes": 120, "older_than": 300}, "ab"),
        ({"max_bytes": 119, "older_than": 300}, "abc"),
        ({"unfit": lambda manifest: manifest.hash in "bd"}, "bd"),
        ({"unfit": lambda manifest: manifest.hash == "d", "older_than": 300}, "abd"),
        ({"unfit": lambda manifest: True, "keep_latest": 1}, "abc"),
    ],
)
def test_rules(rules: dict[str, Any], expected: str) -> None:
    assert gone(**rules) == list(expected)


def test_bytes_that_become_free() -> None:
    choice = choose(ENTRIES, Rules(max_bytes=10), NOW)
    assert [(removal.hash, removal.bytes) for removal in choice.removals] == [("a", 10), ("b", 110), ("c", 110)]
    assert choice.bytes == 10
    assert {removal.reason for removal in choice.removals} == {"max-bytes"}
    assert choose(ENTRIES, Rules(), NOW).bytes == 240


def test_what_is_in_use_stays_and_counts() -> None:
    entries = [entry("a", 100, {1: 100}, in_use=True), entry("b", 500, {2: 10}), entry("c", 900, {3: 10})]
    choice = choose(entries, Rules(max_bytes=110), NOW)
    assert [removal.hash for removal in choice.removals] == ["b"]
    assert (choice.in_use, choice.bytes) == (("a",), 110)
    assert choose(entries, Rules(max_bytes=0, older_than=0), NOW).in_use == ("a",)
    assert choose(entries, Rules(older_than=950), NOW).in_use == ()


def test_unreadable_is_incompatible() -> None:
    entries = [Entry("a", None, 100, {1: 1}), *ENTRIES[:1]]
    assert gone(entries, unfit=lambda manifest: False) == ["a"]
    assert gone(entries, max_bytes=1000) == []
