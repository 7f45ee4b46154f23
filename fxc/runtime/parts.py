"""Weights that checkpoints keep in parts: every expert of a mixture-of-experts layer by itself, in several matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from fxc.errors import WeightError
from fxc.manifest import Weight
from fxc.runtime.inputs import layout

if TYPE_CHECKING:
    from fxc.runtime.weights import Problem, WeightSource


def assembled(source: WeightSource, weights: Sequence[Weight]) -> WeightSource:
    """`source`, with whole weights in place of the parts that it has.

    Raises:
        WeightError: some parts of a weight are missing, or unlike the others.
    """
    given = set(source.names())
    whole = {}
    for weight in weights:
        if not weight.parts or not given.isdisjoint((weight.name, *weight.aliases)):
            continue
        rows = [[part.replace("*", str(index)) for part in weight.parts] for index in range(int(weight.shape[0]))]
        missing = [name for name in chain.from_iterable(rows) if name not in given]
        if not missing:
            whole[weight.name] = rows
        elif len(missing) < len(rows) * len(weight.parts):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise WeightError(f"weight {weight.name} comes in parts, of which {missing[0]}{more} is missing")
    return Assembled(source, whole) if whole else source


class Assembled:
    """A source in which some weights are stacked from their parts, when they are asked for."""

    def __init__(self, source: WeightSource, whole: dict[str, list[list[str]]]) -> None:
        """`whole`: by name of a weight, for each index of its first dimension the parts along its second."""
        self.strict = source.strict
        self._source = source
        self._whole = whole
        self._parts = {name for rows in whole.values() for name in chain.from_iterable(rows)}

    def names(self) -> Iterable[str]:
        return [*(name for name in self._source.names() if name not in self._parts), *self._whole]

    def layout(self, name: str) -> tuple[tuple[int, ...], str]:
        if name not in self._whole:
            return self._source.layout(name)
        rows = self._whole[name]
        first = [self._source.layout(part) for part in rows[0]]
        for part, expected in zip(chain.from_iterable(rows), first * len(rows), strict=True):
            came = self._source.layout(part)
            if came != expected or not came[0] or came[0][1:] != first[0][0][1:] or came[1] != first[0][1]:
                raise WeightError(
                    f"weight {part} is {layout(*came)}, unlike {rows[0][0]}, which is {layout(*first[0])}"
                )
        (_, *rest), dtype = first[0]
        return (len(rows), sum(shape[0] for shape, _ in first), *rest), dtype

    def memory(self, name: str, weight: Weight, device: torch.device) -> Problem | None:
        parts = chain.from_iterable(self._whole.get(name, [[name]]))
        return next(filter(None, (self._source.memory(part, weight, device) for part in parts)), None)

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        if name not in self._whole:
            return self._source.tensor(name, device)
        shape, dtype = self.layout(name)
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for index, row in enumerate(self._whole[name]):
            start = 0
            for part in row:
                tensor = self._source.tensor(part, device)
                made[index, start : start + len(tensor)] = tensor
                start += len(tensor)
        return made
