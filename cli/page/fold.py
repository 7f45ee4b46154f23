"""Says much repeated text once: sequences that repeat, and names that differ in numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LONGEST = 64
"""Items of a sequence that is looked for again behind itself."""
FEW = 6
"""Numbers that are all listed."""


class Repeated(NamedTuple):
    """Some items, and how often they stand one after another."""

    times: int
    unit: tuple[str, ...]


def fold(items: Sequence[str]) -> list[Repeated]:
    """A sequence with its repetitions counted.

    >>> fold(["a", "x", "b", "x", "b", "x", "c"])
    [Repeated(times=1, unit=('a',)), Repeated(times=2, unit=('x', 'b')), Repeated(times=1, unit=('x', 'c'))]
    """
    found: list[Repeated] = []
    at = 0
    while at < len(items):
        times, length = max(
            ((_times(items, at, length), length) for length in range(1, min(LONGEST, len(items) - at) + 1)),
            key=lambda pair: (pair[0] > 1, pair[0] * pair[1] if pair[0] > 1 else 0, -pair[1]),
        )
        part = tuple(items[at : at + length])
        if times == 1 and found and found[-1].times == 1:
            found[-1] = Repeated(1, (*found[-1].unit, *part))
        else:
            found.append(Repeated(times, part))
        at += times * length
    return found


def _times(items: Sequence[str], at: int, length: int) -> int:
    unit, count = items[at : at + length], 1
    while items[at + count * length : at + (count + 1) * length] == unit:
        count += 1
    return count


class Names(NamedTuple):
    """Names that are the same but for numbers."""

    text: str
    """`layers.{0..31}.weight`."""
    number: int


def merge(names: Iterable[str]) -> list[Names]:
    """Names with their numbers left out where they differ, each once, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [Names(_merged(group), len(group)) for group in groups.values()]


_NUMBER = re.compile(r"\d+")


def _merged(names: Sequence[str]) -> str:
    columns = [sorted({int(number) for number in column}) for column in zip(*map(_NUMBER.findall, names), strict=True)]
    numbers = iter(columns)
    return _NUMBER.sub(lambda match: _range(next(numbers), match[0]), names[0])


def _range(numbers: Sequence[int], first: str) -> str:
    if len(numbers) == 1:
        return first
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    shown = [*map(str, numbers[:3]), "…", str(numbers[-1])] if len(numbers) > FEW else [*map(str, numbers)]
    return "{" + ",".join(shown) + "}"
