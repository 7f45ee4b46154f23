"""Size numbers in a graph: which nodes they are, and their values at given sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx


def is_scalar(node: fx.Node) -> bool:
    """Whether the node makes a size number or a truth value out of size numbers, not a tensor."""
    if node.op != "call_function":
        return False
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def evaluate(node: fx.Node, sizes: Mapping[str, int]) -> Any:
    """The value of a scalar node when the dimensions have these sizes.

    Raises:
        KeyError: it depends on a number that is no dimension (a value read out of a tensor).
    """
    if "expr" in node.meta:
        names = {"Max": max, "Min": min, **sizes}
        try:
            return eval(node.meta["expr"], {"__builtins__": {}}, names)  # our own printer wrote the text
        except (NameError, SyntaxError, TypeError):
            pass  # an expression that is no plain Python: compute it from its arguments
    if node.target is torch.ops.aten.sym_size.int:
        raise KeyError(node.meta.get("expr", node.name))
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: evaluate(arg, sizes))
    return node.target(*args, **kwargs)  # type: ignore[operator]
