"""`StepFactory`: what makes the function that computes a model, out of a stitched program and compiled pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[..., Any]
"""Computes the model: its inputs in order, and its result."""


@dataclass(frozen=True, eq=False)
class StepFactory:
    """A function of transformed_code.py with its pieces."""

    make: Callable[..., Step]
    """`make(pieces, weights, empty)`, see the text of transformed_code.py."""
    pieces: tuple[Callable[..., Any], ...]
    """One for each call of a piece, in order."""

    def __call__(self, weights: Sequence[torch.Tensor]) -> Step:
        """The step, with the tensors of all weights and constants."""
        return self.make(self.pieces, weights)
