"""Small functions as pieces, and what passes make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxc.graph_run import drawn
from fxc.graph_text import parse_graph
from fxc.partition import partition
from fxc.passes import PIPELINE, Outcome, Pass, Ran, run
from fxc.shapes import Range
from fxc.spec import InputSpec
from fxc.trace import capture
from fxc.traced import Traced

BOX = Range((("n", 1, 64),))
Function = Callable[..., Any]


def piece(function: Function, shapes: Mapping[str, str], box: Range = BOX) -> str:
    """The source of a function of tensors, by name of the argument: `{"x": "bfloat16[n, 256]"}`."""
    return partition(traced(function, shapes, box), ()).calls[0].piece.text


def traced(function: Function, shapes: Mapping[str, str], box: Range = BOX) -> Traced:
    """The whole graph of such a function."""
    inputs = {}
    for name, text in shapes.items():
        dtype, _, sizes = text.rstrip("]").partition("[")
        shape = tuple(int(size) if size.isdigit() else size for size in sizes.split(", ") if size)
        inputs[name] = InputSpec(shape=shape, dtype=dtype)  # type: ignore[arg-type]
    module = nn.Module()
    module.forward = function  # type: ignore[method-assign, assignment]
    return capture(module, inputs, box, "cpu")


def outcome(ran: Ran, name: str) -> Outcome:
    """What one pass found; nothing where it looked at nothing."""
    return dict(ran.outcomes).get(name, Outcome())


def alone(text: str, name: str, box: Range = BOX) -> Ran:
    """Run one pass of the pipeline, on what is left where nothing is done for nothing."""
    return run(text, box, [cls() for cls in PIPELINE if cls.name in ("noop", name)])


def every(text: str, box: Range = BOX) -> Ran:
    """Run all of them."""
    return run(text, box, [cls() for cls in PIPELINE])


def reasons(ran: Ran, name: str) -> list[str]:
    """Of near misses, each as `node: reason`."""
    return [f"{miss.node}: {miss.reason}" for miss in outcome(ran, name).near_misses]


def inputs(text: str, point: Mapping[str, int]) -> list[Tensor]:
    _, layouts = parse_graph(text)
    return [drawn(layout, point, None, "cpu", seed) for seed, layout in enumerate(layouts)]


def execute(text: str, given: list[Tensor]) -> tuple[Tensor, ...]:
    """Run a piece as Python, on copies."""
    graph, _ = parse_graph(text)
    with torch.no_grad():
        return torch.fx.GraphModule({}, graph)(*(tensor.clone() for tensor in given))


def both(function: Function, shapes: Mapping[str, str], *passes: Pass) -> tuple[str, str]:
    """A piece before and after passes, as a golden holds it."""
    text = piece(function, shapes)
    return text, run(text, BOX, passes).text
