"""Which process of a distributed job this is."""

from __future__ import annotations

import os

import msgspec

from fxc.errors import UsageError


class Ranks(msgspec.Struct, frozen=True):
    """Position of this process in a distributed job."""

    rank: int = 0
    world_size: int = 1
    data_parallel_rank: int = 0

    @property
    def label(self) -> str:
        """For people: `1 of 2`."""
        parallel = f", data-parallel rank {self.data_parallel_rank}" if self.data_parallel_rank else ""
        return f"{self.rank} of {self.world_size}{parallel}"

    @property
    def directory(self) -> str:
        return f"rank_{self.rank}_{self.data_parallel_rank}"


def ranks(rank: int | None, world_size: int | None, dp_rank: int | None) -> Ranks:
    """From arguments, else from RANK and WORLD_SIZE in the environment, else one process.

    Raises:
        UsageError: no numbers, a rank outside its world, or one above 0 of a world of unknown size.
    """
    found = number(rank, "RANK") or 0
    size = number(world_size, "WORLD_SIZE")
    if size is None and found > 0:
        hint = "give the number of processes too: --world-size, world_size or WORLD_SIZE"
        raise UsageError(f"rank {found} is of a world whose size is not given", hint)
    size = 1 if size is None else size
    if size < 1:
        raise UsageError(f"a world of {size} has no ranks", "its size is 1 or more")
    if not 0 <= found < size:
        raise UsageError(f"rank {found} is outside a world of {size}", f"ranks are 0 to {size - 1}")
    if dp_rank is not None and dp_rank < 0:
        raise UsageError(f"data-parallel rank {dp_rank} is below 0", "they are counted from 0")
    return Ranks(found, size, dp_rank or 0)


def number(given: int | None, variable: str) -> int | None:
    """An argument, else a variable of the environment; None where neither says anything.

    Raises:
        UsageError: the variable is no number.
    """
    text = os.environ.get(variable, "")
    if given is not None or not text:
        return given
    if not text.isdecimal():
        raise UsageError(f"the environment variable {variable} is {text!r}, expected a number", f"unset {variable}")
    return int(text)
