"""Runs whole programs before they are published: the stitched text against the graph that was traced.

Every piece runs as the Python it was compiled from, so that both sides call the same ops in the same order, and what
could differ is what fxc did between tracing and stitching: what passes made of the whole graph, which tensor goes
where, what is computed again on the other side of a cut, what is written and when. That binaries equal their pieces is
proved piece by piece.
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
from fxc.manifest import Proof, Unproved
from fxc.partition import Partition
from fxc.prove import accepted, largest_error, tolerance
from fxc.scalars import evaluate, is_scalar
from fxc.shapes import Range, point_label, small_point

LIMIT = {"cpu": 512 << 20, "cuda": 16 << 30}
"""Bytes of weights, constants and inputs from which on a program is not run: making them up would take seconds."""


def rehearse(
    parts: Mapping[str, Partition], inputs: Sequence[str], weights: Sequence[str], device: str
) -> tuple[list[Proof], list[Unproved]]:
    """Run every step at two points of its range on made-up tensors.

    Args:
        parts: by name of the step.
        inputs: names of the program's arguments, in order.
        weights: names of weights and constants, in the order in which steps take them.

    Returns:
        For each step and point a comparison, or the reason why there is none.

    Raises:
        ProofError: a stitched step does not equal its graph, or an op does not give the shape that its fake promised.
    """
    functions = {digest: call.piece.text for digest, call in stitch.unique_pieces(parts.values()).items()}
    text = stitch.stitch(parts, inputs, weights, "Pieces as functions.", functions)
    namespace: dict[str, Any] = {}
    exec(compile(text, "<stitched program>", "exec"), namespace)
    namespace["DEVICE"] = torch.device(device)
    proof, unproved = [], []
    for name, part in parts.items():
        step = _Step(name, part, inputs, weights, namespace[name], namespace["PIECES"][name], device)
        for point in _points(part.traced.range):
            found = step.check(point)
            if isinstance(found, Proof):
                proof.append(found)
            else:
                unproved.append(Unproved(piece=name, shape=point_label(point), reason=found))
    return proof, unproved


def _points(box: Range) -> list[dict[str, int]]:
    low, small = box.low(), small_point(box)
    return [low] if low == small else [low, small]


@dataclasses.dataclass
class _Step:
    """One step function, and the graph that it was stitched from."""

    name: str
    part: Partition
    inputs: Sequence[str]
    weights: Sequence[str]
    make: Any
    pieces: Any
    device: str

    def check(self, point: Mapping[str, int]) -> Proof | str:
        """The comparison at `point`, or why there is none."""
        traced = self.part.traced.original or self.part.traced
        where = f"{self.name} at {point_label(point)}"
        limit = tolerance(print_graph(traced.graph, "f"))
        try:
            tensors = graph_run.arguments([traced], point, self.device, LIMIT[self.device])
            if tensors is None:
                return f"weights and inputs take more than {LIMIT[self.device] >> 20} MiB"
            expected, after = graph_run.run(traced, tensors, point, self.device)
            again, _ = graph_run.run(traced, tensors, point, self.device)
        except graph_run.WrongShape as error:
            hint = "the fake (meta) implementation of that op must give the shape that the op gives"
            raise ProofError(f"{where}: {error}", hint) from None
        except Exception as error:  # made-up numbers that the model has no answer to, a device that is not here
            return f"eager fails on made-up inputs: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if any(largest_error(a, b) > limit for a, b in zip(expected, again, strict=True)):
            return "eager does not equal itself"
        given = graph_run.own(traced, tensors)
        try:
            found = self._run(given)
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:
            raise _fault(f"{where}: {type(error).__name__}: {error}") from error
        nodes = [leaf for leaf in _output(traced.graph) if isinstance(leaf, fx.Node) and not is_scalar(leaf)]
        values = dict(zip(nodes, expected, strict=True))
        worst = 0.0
        for index, (leaf, have) in enumerate(_leaves(traced.output, found)):
            what = f"result {index} of {where}"
            if leaf in values:
                worst = max(worst, self._compare(what, have, values[leaf], limit))
            elif isinstance(leaf, fx.Node) and have != (number := evaluate(leaf, point)):
                raise _fault(f"{what} is {have}, expected {number}")
        for role, want in after.items():
            worst = max(worst, self._compare(f"{role[1]} after {where}", given[role], want, limit))
        return Proof(piece=self.name, shape=point_label(point), max_rel_err=worst, tolerance=limit)

    def _run(self, given: Mapping[graph_run.Role, torch.Tensor]) -> Any:
        by_name = {name: tensor for (kind, name), tensor in given.items() if kind != "input"}
        inputs = {name: tensor for (kind, name), tensor in given.items() if kind == "input"}
        step = self.make(self.pieces, tuple(by_name.get(name) for name in self.weights))
        with torch.no_grad(), graph_run.seeded(self.device):
            return step(*(inputs[name] for name in self.inputs))

    def _compare(self, what: str, have: Any, want: torch.Tensor, limit: float) -> float:
        if not isinstance(have, torch.Tensor) or have.shape != want.shape or have.dtype != want.dtype:
            shown = f"{have.dtype}{list(have.shape)}" if isinstance(have, torch.Tensor) else type(have).__name__
            raise _fault(f"{what} is {shown}, the traced graph gives {want.dtype}{list(want.shape)}")
        error = largest_error(have, want)
        if error > accepted(want.dtype, limit):
            raise _fault(f"{what}: relative error {error:.3g}, accepted is {limit:.3g}")
        return error


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
