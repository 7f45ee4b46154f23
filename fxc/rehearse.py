"""Runs whole programs before they are published: the stitched text against the graph that was traced.

Every piece runs as the Python it was compiled from, so that both sides call the same ops in the same order, and what
could differ is what fxc did between tracing and stitching: which tensor goes where, what is computed again on the other
side of a cut, what is written and when. That binaries equal their pieces is proved piece by piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxc import graph_run, stitch
from fxc.errors import ProofError
from fxc.graph_text import print_graph
from fxc.manifest import Proof
from fxc.partition import Partition
from fxc.prove import row_errors, tolerance
from fxc.scalars import is_scalar
from fxc.shapes import Range

LIMIT = {"cpu": 512 << 20, "cuda": 16 << 30}
"""Bytes of weights, constants and inputs from which on a program is not run: making them up would take seconds."""

SMALL = 6
"""Points are made of values up to this, where the bounds allow: what is looked for does not depend on the size."""


def rehearse(parts: Mapping[str, Partition], inputs: Sequence[str], weights: Sequence[str], device: str) -> list[Proof]:
    """Run every step at two points of its range on made-up tensors.

    Args:
        parts: by name of the step.
        inputs: names of the program's arguments, in order.
        weights: names of weights and constants, in the order in which steps take them.

    Returns:
        One line per step and point; none for a step that is too large, or whose graph refuses made-up inputs.

    Raises:
        ProofError: a stitched step does not equal its graph.
    """
    functions = {digest: call.piece.text for digest, call in stitch.unique_pieces(parts.values()).items()}
    text = stitch.stitch(parts, inputs, weights, "Pieces as functions.", functions)
    namespace: dict[str, Any] = {}
    exec(compile(text, "<stitched program>", "exec"), namespace)
    lines = []
    for name, part in parts.items():
        pieces = namespace["PIECES"][name]
        for point in _points(part.traced.range):
            tensors = graph_run.arguments([part.traced], point, device, LIMIT[device])
            if tensors is not None:
                step = _Step(part, inputs, weights, namespace[name], pieces, device)
                lines += step.check(tensors, point, f"{name} at {_label(point)}")
    return lines


def _points(box: Range) -> list[dict[str, int]]:
    low = box.low()
    small = {name: min(max(SMALL - index, start), stop) for index, (name, start, stop) in enumerate(box.bounds)}
    return [low] if low == small else [low, small]


def _label(point: Mapping[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in point.items()) or "static"


@dataclasses.dataclass
class _Step:
    """One step function, and the graph that it was stitched from."""

    part: Partition
    inputs: Sequence[str]
    weights: Sequence[str]
    make: Any
    pieces: Any
    device: str

    def check(self, tensors: Mapping[graph_run.Role, torch.Tensor], point: Mapping[str, int], what: str) -> list[Proof]:
        traced = self.part.traced
        try:
            expected, after = graph_run.run(traced, tensors, point, self.device)
            again, _ = graph_run.run(traced, tensors, point, self.device)
        except Exception:
            return []  # made-up numbers that the model has no answer to, or a device that is not here
        limit = tolerance(print_graph(traced.graph, "f"))
        if any(_error(a, b) > limit for a, b in zip(expected, again, strict=True)):
            return []  # not even equal to itself
        given = {role: graph_run.copied(tensor) for role, tensor in tensors.items()}
        try:
            found = self._run(given)
        except Exception as error:
            raise _fault(f"{what}: {type(error).__name__}: {error}") from error
        worst = 0.0
        nodes = [leaf for leaf in _output(traced.graph) if isinstance(leaf, fx.Node) and not is_scalar(leaf)]
        values = dict(zip(nodes, expected, strict=True))
        for index, (leaf, have) in enumerate(_leaves(traced.output, found)):
            if leaf in values:
                worst = max(worst, self._compare(f"result {index} of {what}", have, values[leaf], limit))
        for role, want in after.items():
            worst = max(worst, self._compare(f"{role[1]} after {what}", given[role], want, limit))
        return [Proof(piece=what.partition(" ")[0], shape=_label(point), max_rel_err=worst, tolerance=limit)]

    def _run(self, given: Mapping[graph_run.Role, torch.Tensor]) -> Any:
        by_name = {name: tensor for (kind, name), tensor in given.items() if kind != "input"}
        inputs = {name: tensor for (kind, name), tensor in given.items() if kind == "input"}
        step = self.make(self.pieces, tuple(by_name.get(name) for name in self.weights))
        with torch.no_grad(), graph_run.seeded(self.device):
            # An input that the graph does not read has no node; what is handed over instead is not looked at.
            return step(*(inputs.get(name) for name in self.inputs))

    def _compare(self, what: str, have: Any, want: torch.Tensor, limit: float) -> float:
        if not isinstance(have, torch.Tensor) or have.shape != want.shape or have.dtype != want.dtype:
            shown = f"{have.dtype}{list(have.shape)}" if isinstance(have, torch.Tensor) else type(have).__name__
            raise _fault(f"{what} is {shown}, the traced graph gives {want.dtype}{list(want.shape)}")
        error = _error(have, want)
        if error > (limit if want.is_floating_point() or want.is_complex() else 0.0):
            raise _fault(f"{what}: relative error {error:.3g}, accepted is {limit:.3g}")
        return error


def _error(have: torch.Tensor, want: torch.Tensor) -> float:
    errors = row_errors(have, want)
    return float(errors.max()) if errors.numel() else 0.0


def _output(graph: fx.Graph) -> Sequence[Any]:
    leaves: Sequence[Any] = next(iter(reversed(graph.nodes))).args[0]
    return leaves


def _leaves(structure: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Each leaf of a traced output with the value that stands in its place."""
    if isinstance(structure, Mapping):
        for key, inner in structure.items():
            yield from _leaves(inner, value[key])
    elif dataclasses.is_dataclass(structure):
        for field in dataclasses.fields(structure):
            yield from _leaves(getattr(structure, field.name), value[field.name])
    elif isinstance(structure, (tuple, list)):
        for inner, item in zip(structure, value, strict=True):
            yield from _leaves(inner, item)
    else:
        yield structure, value


def _fault(what: str) -> ProofError:
    return ProofError(
        f"the stitched program does not equal the traced graph: {what}",
        "this is a fault of fxc: please report the model",
    )
