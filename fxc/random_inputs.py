"""Made-up inputs: for tracing, for proofs, for warming up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxc.shapes import size_at
from fxc.spec import InputSpec


def example_inputs(
    inputs: Mapping[str, InputSpec], sizes: Mapping[str, int], device: str, generator: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """Made-up inputs: integers from `values` (0 and 1 by default), floats from `values` or a standard normal."""
    made = {}
    for name, spec in inputs.items():
        shape = [size_at(part, sizes) for part in spec.shape]
        dtype = getattr(torch, spec.dtype)
        made[name] = draw(shape, dtype, spec.values, generator).to(device)
    return made


def draw(
    shape: Sequence[int], dtype: torch.dtype, values: tuple[float, float] | None, generator: torch.Generator | None
) -> torch.Tensor:
    """A random tensor with entries in the half-open range `values`, on the generator's device (the CPU without one).

    By default integers are 0 or 1, and floats are from a standard normal. Integers are all different where `values` has
    enough of them: they may be places to write to, of which one that is written twice may hold either value.
    """
    where: Any = {"generator": generator, "device": generator.device if generator else "cpu"}
    size = list(shape)
    if dtype.is_floating_point or dtype.is_complex:
        if values is None:
            return torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float32, **where).to(dtype)
        low, high = values
        return (torch.rand(size, **where) * (high - low) + low).to(dtype)
    low, high = (0, 2) if values is None else values
    first = math.ceil(low)
    stop = max(math.ceil(high), first + 1)
    if math.prod(size) <= stop - first <= PERMUTED:
        return (torch.randperm(stop - first, **where)[: math.prod(size)] + first).reshape(size).to(dtype)
    return torch.randint(first, stop, size, **where).to(dtype)


PERMUTED = 1 << 20
"""Integers of a longer range are drawn one by one: few of them would be equal, and a permutation takes long."""
