"""Bytes and JSON values that are nearly what they were, drawn from a seeded generator."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -(2**63) - 1, 0.5, 1e308, float("nan"), float("inf"), "", ".",
    "..", "/", "/etc/passwd", "../x", "a/../b", "a//b", "a\0b", "a\nb", "x" * 5000, "x): pass #", "class", "é", "\ud800",
    "*", "%s", "{}", [], {}, [[]], [None], ["n", 1, 2], {"": {}},
)  # fmt: skip
"""Values that a program which writes manifests would not write."""
DEEP = 100_000
"""Levels of nesting beyond what any parser recurses to."""


def changed_bytes(data: bytes, chance: random.Random) -> bytes:
    """Something flipped, cut off, inserted, removed, repeated or moved; never the same bytes."""
    while True:
        at, other = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        some = chance.randbytes(chance.randrange(1, 9))
        bit = bytes([data[at] ^ 1 << chance.randrange(8)]) if at < len(data) else b"\0"
        made = chance.choice(
            (
                data[:at] + bit + data[at + 1 :],
                data[:at] + some + data[at + len(some) :],
                data[:at],
                data[:at] + some + data[at:],
                data[:at] + data[other:],
                data[:other] + data[at:],
                data[:at] + bytes(other - at) + data[other:],
                data[other:] + data[:other],
                data[:at] + data[at:other][::-1] + data[other:],
            )
        )
        if made != data:
            return made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed_value(value: Any, chance: random.Random) -> Any:
    """One value removed, renamed, repeated, or replaced by an odd one or by another of the same document."""
    made = copy.deepcopy(value)
    there = [*places(made)]
    *above, last = chance.choice(there)
    parent = at(made, above)
    how = chance.randrange(6)
    if how == 0:
        del parent[last]
    elif how == 1 and isinstance(parent, dict):
        parent[str(chance.choice(ODD))] = parent.pop(last)
    elif how == 2 and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[last]))
    elif how == 3:
        parent[last] = copy.deepcopy(at(value, chance.choice(there)))
    elif how == 4 and isinstance(parent[last], (int, float)):
        parent[last] += chance.choice((-1, 1, 1000, 0.5))
    else:
        parent[last] = copy.deepcopy(chance.choice(ODD))
    return made


def at(value: Any, path: Any) -> Any:
    """The value that a path leads to."""
    for key in path:
        value = value[key]
    return value
