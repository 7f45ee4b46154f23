"""A step whose compiled pieces replay graphs; the ops between them, attention above all, run as they are.

A graph reads and writes fixed addresses. What one graph hands to the next lies in their memory pool; so does what a
piece between two graphs writes into, since the step makes it with `empty`. Only the results of other ops come at a new
address each time, and are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxc import _torch_run
from fxc.runtime.recorder import Recorder, Replay
from fxc.runtime.step import StepFactory

Tensors = list[torch.Tensor]


class Piecewise:
    """One size of a step."""

    def __init__(
        self, factory: StepFactory, weights: Sequence[torch.Tensor], captured: Sequence[bool], recorder: Recorder
    ) -> None:
        """
        Args:
            captured: for each call of a piece, whether its shapes are fixed.
        """
        self.recorder = recorder
        self._static: set[int] = set()
        """Addresses of tensors that stay where they are. A view that is made between graphs may begin elsewhere."""
        self._empties: Tensors = []
        self._pieces: list[Callable[[Tensors], Any]] = []
        self._captured, self._factory, self._weights = captured, factory, weights

    def record(self, arguments: Sequence[torch.Tensor], static: Iterable[torch.Tensor]) -> Any:
        """Run the step once, and record each piece on the way.

        Args:
            static: tensors that later calls find where they are now: weights, buffers of inputs.

        Returns:
            The step's result, which keeps its memory.
        """
        self._keep(static)
        recording = [
            self._recording(piece) if captured else self._plain(piece)
            for piece, captured in zip(self._factory.pieces, self._captured, strict=True)
        ]
        result = self._factory.make(recording, self._weights, self._make_empty)(*arguments)
        self._step = self._factory.make(self._pieces, self._weights, self._next_empty)
        return result

    def __call__(self, *arguments: torch.Tensor) -> Any:
        self._empty = iter(self._empties)
        return self._step(*arguments)

    def _plain(self, piece: Callable[[Tensors], Any]) -> Callable[[Tensors], Any]:
        def run(args: Tensors) -> Any:
            self._pieces.append(piece)
            return piece(args)

        return run

    def _recording(self, piece: Callable[[Tensors], Any]) -> Callable[[Tensors], Any]:
        def run(args: Tensors) -> Any:
            moving = [position for position, tensor in enumerate(args) if not self._stays(tensor)]
            args = [*args]
            for position in moving:
                args[position] = self.recorder.make(args[position].clone)
            replay, results = self.recorder.record(lambda: piece(args), piece)
            replay()
            self._keep(results)
            copies = [(position, _torch_run.without_owner(args[position])) for position in moving]
            self._pieces.append(_replaying(replay, _torch_run.without_owner(list(results)), copies))
            return results

        return run

    def _make_empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = self.recorder.make(lambda: torch.empty(shape, dtype=dtype, device=device))
        self._keep([made])
        self._empties.append(_torch_run.without_owner(made))
        return made

    def _next_empty(self, shape: tuple[int, ...], **_: Any) -> torch.Tensor:
        return next(self._empty)

    def _keep(self, tensors: Iterable[torch.Tensor]) -> None:
        self._static |= {tensor.data_ptr() for tensor in tensors}

    def _stays(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or tensor.data_ptr() in self._static


def _replaying(replay: Replay, results: Tensors, copies: Sequence[tuple[int, torch.Tensor]]) -> Callable[..., Tensors]:
    """What stands for a piece in a call."""

    def run(args: Tensors) -> Tensors:
        for position, tensor in copies:
            tensor.copy_(args[position])
        replay()
        return results

    def run_in_place(args: Tensors) -> Tensors:
        replay()
        return results

    return run if copies else run_in_place
