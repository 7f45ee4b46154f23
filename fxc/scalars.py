"""Size numbers in a graph: which nodes they are, and their values at given sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import fx

NAMES: dict[str, Any] = {
    "abs": abs, "float": float, "math": math, "round": round, "torch": torch,
    "max": lambda *values: reduce(torch.sym_max, values),
    "min": lambda *values: reduce(torch.sym_min, values),
}  # fmt: skip
"""What an expression of sizes may use beside names of dimensions."""


WORD = re.compile(r"(?<![\w.])[^\W\d]\w*")
"""A name in an expression of sizes, attributes left out."""


def is_scalar(node: fx.Node) -> bool:
    """Whether the node makes a size number or a truth value out of size numbers, not a tensor."""
    if node.op != "call_function":
        return False
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def compute(expression: str, sizes: Mapping[str, Any]) -> Any:
    """A size written as an expression of dimensions; their values may be symbolic.

    Raises:
        KeyError: it depends on a number that is no dimension (a value read out of a tensor).
    """
    try:
        return eval(expression, {"__builtins__": {}}, {**NAMES, **sizes})  # our own printer wrote the text
    except NameError as error:
        raise KeyError(expression) from error


def evaluate(node: fx.Node, sizes: Mapping[str, int]) -> Any:
    """The value of a scalar node when the dimensions have these sizes.

    Raises:
        KeyError: it depends on a number that is no dimension.
    """
    value = node.meta["val"]
    return value if isinstance(value, (int, float, bool)) else compute(node.meta["expr"], sizes)
