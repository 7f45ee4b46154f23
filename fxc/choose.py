"""Level 3: whether a fusion is faster than the graph without it, for each piece and each range or size.

A unit that fusions were found in has forms: with all of them, and without some. They are compiled and proved as units
of their own. Then fusions are left out one after the other, and each stays out where the graph without it is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from fxc.manifest import Binary, PassReport, Piece, Timed

if TYPE_CHECKING:
    from fxc.lower import Unit


@dataclass
class Race:
    """What is known of a unit's forms so far."""

    unit: Unit
    left_out: frozenset[str] = frozenset()
    """Fusions that were slower."""
    tried: int = 0
    """Fusions that were timed, from the first one."""
    timed: list[Timed] = field(default_factory=list)

    @property
    def fusion(self) -> str | None:
        """The next one to be timed."""
        waiting = self.unit.fusions[self.tried :]
        return waiting[0] if waiting else None

    @property
    def best(self) -> Unit:
        return self.unit.form(self.left_out)

    @property
    def other(self) -> Unit:
        """The best form without the next fusion."""
        assert self.fusion is not None
        return self.unit.form(self.left_out | {self.fusion})

    def forms(self) -> Iterator[Unit]:
        """What has to be compiled for the next comparison, or for the result."""
        yield self.best
        if self.fusion is not None:
            yield self.other

    @property
    def even(self) -> bool:
        """Whether the next fusion makes no difference, as what it builds on was left out."""
        return self.best.key == self.other.key

    def decide(self, times: Sequence[Mapping[str, Any]]) -> None:
        """Keep the next fusion where its times are shorter, over all points as a product, and where there are none."""
        assert self.fusion is not None
        if not times:
            self.skip()
            return
        ratio = math.prod(line["fused_us"] / line["apart_us"] for line in times)
        self.timed += [Timed(fusion=self.fusion, kept=ratio < 1, **line) for line in times]
        self.skip() if ratio < 1 else self.leave_out()

    def skip(self) -> None:
        """Go on to the next one."""
        self.tried += 1

    def leave_out(self) -> None:
        assert self.fusion is not None
        self.left_out |= {self.fusion}
        self.tried += 1


def forms(unit: Unit, fusions: Sequence[str], without: Any) -> Unit:
    """The unit with a form for each choice among its fusions.

    Args:
        without: makes the form that lacks some of them.
    """
    choices = [frozenset(f for i, f in enumerate(fusions) if bits >> i & 1) for bits in range(1, 1 << len(fusions))]
    return replace(unit, fusions=tuple(fusions), forms=tuple((choice, without(choice)) for choice in choices))


def report(
    passes: Iterable[PassReport], pieces: Mapping[str, Sequence[Piece]], binaries: Iterable[Binary]
) -> tuple[PassReport, ...]:
    """What passes found, with what timing their fusions gave."""
    names = {piece.name: piece.unique for step in pieces.values() for piece in step if piece.kind == "compiled"}
    timed = {(binary.piece, binary.range): binary.timed for binary in binaries if binary.timed}

    def lines(name: str, piece: str, shape: str) -> tuple[Timed, ...]:
        return tuple(line for line in timed.get((names.get(piece, ""), shape), ()) if line.fusion == name)

    return tuple(
        msgspec.structs.replace(
            entry,
            sites=tuple(
                msgspec.structs.replace(site, timed=lines(entry.name, site.piece, site.shape)) for site in entry.sites
            ),
        )
        for entry in passes
    )
