"""Conditions on sizes that an export took for granted."""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def guards(graph: fx.Graph) -> Iterator[tuple[sympy.Expr, str]]:
    """Conditions that tracing took for granted, with the place in the model's source where known."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            shape_env = value.fake_mode.shape_env  # type: ignore[attr-defined]
            if shape_env is None:
                continue
            for guard in shape_env.guards:
                place = getattr(guard.sloc, "maybe_user_loc", None)
                yield guard.expr, str(place or "")
            # Not all of these become assertions in the graph.
            yield from ((item.expr, "") for items in shape_env.deferred_runtime_asserts.values() for item in items)
            return


def failed_guards(error: BaseException | None) -> Iterator[str]:
    """FILE:LINE in the model for every condition on sizes that an export assumed before it raised `error`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            for value in trace.tb_frame.f_locals.values():
                if isinstance(value, ShapeEnv):
                    places = (getattr(guard.sloc, "maybe_user_loc", None) for guard in value.guards)
                    yield from (str(place) for place in places if place)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
