"""Where captured graphs read the arguments of a call, and how a call's tensors get there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from fxc import _torch_run
from fxc.manifest import Input
from fxc.shapes import dims_of, size_at

Views = list[torch.Tensor | None]
"""Per input, the part of its buffer that a size reads; None for one that is handed on as it comes."""


class StaticInputs:
    """One buffer for each input. All sizes share them, as only one replays at a time."""

    def __init__(self, inputs: Sequence[Input], sizes: Iterable[Mapping[str, int]], device: torch.device) -> None:
        """
        Args:
            inputs: those that come with each call.
            sizes: all that may be captured.
        """
        self.inputs = inputs
        sizes = list(sizes)
        self._buffers = {}
        for entry in inputs:
            largest = max((_elements(entry, size) for size in sizes if _fixed(entry, size)), default=0)
            self._buffers[entry.name] = stand_in(entry, [largest], device)

    def views(self, size: Mapping[str, int]) -> Views:
        """What a graph for `size` reads; an input with a dimension that the size leaves free is not copied."""
        found: Views = []
        for entry in self.inputs:
            if _fixed(entry, size):
                shape = [size_at(part, size) for part in entry.shape]
                found.append(self._buffers[entry.name][: math.prod(shape)].view(shape))
            else:
                found.append(None)
        return found

    def fill(self, views: Views, given: Sequence[torch.Tensor]) -> None:
        """Copy a call's tensors, and fill the rows behind them as the inputs say. What has a pad has no other dimension
        than the first (spec.py sees to it)."""
        into, values = [], []
        for entry, view, tensor in zip(self.inputs, views, given, strict=True):
            if view is None:
                continue
            if view.shape != tensor.shape:
                rest = view[len(tensor) :]
                if len(tensor) and not isinstance(entry.pad, int):
                    rest.copy_(tensor[-1:])
                else:
                    rest.fill_(entry.pad if isinstance(entry.pad, int) else 0)
                view = view[: len(tensor)]
            into.append(view)
            values.append(tensor)
        _torch_run.copy_all(into, values)

    def unpadded(self, size: Mapping[str, int]) -> str:
        """Why a batch cannot be padded to `size`; empty where it can."""
        missing = [entry.name for entry in self.inputs if set(dims_of(entry.shape)) & size.keys() and entry.pad is None]
        return f"model.yaml does not say what to pad {', '.join(missing)} with" if missing else ""


def stand_in(entry: Input, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """An input of nothing but pad rows: what is recorded also runs, and must write into no cache."""
    value = entry.pad if isinstance(entry.pad, int) else 0
    return torch.full(tuple(shape), value, dtype=getattr(torch, entry.dtype), device=device)


def _fixed(entry: Input, size: Mapping[str, int]) -> bool:
    return set(dims_of(entry.shape)) <= size.keys()


def _elements(entry: Input, size: Mapping[str, int]) -> int:
    return math.prod(size_at(part, size) for part in entry.shape)
