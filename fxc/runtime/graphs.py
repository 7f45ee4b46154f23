"""The CUDA graphs of a loaded program: captured for sizes, chosen for a batch, replayed.

A replay reads and writes the addresses of the recording. Arguments of the call are copied into static buffers first.
Weights and bound inputs are read where they lie. Results lie in the graphs' memory pool and are overwritten by the next
replay of any size.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from fxc import _torch_run
from fxc.capture_plan import Mode, Recorded
from fxc.errors import RunError
from fxc.manifest import Input, Tensor
from fxc.runtime.choice import BatchDescriptor, Captured, Choice, choose
from fxc.runtime.piecewise import Piecewise
from fxc.runtime.recorder import Recorder
from fxc.runtime.static_inputs import StaticInputs, Views, stand_in
from fxc.runtime.step import Step, StepFactory
from fxc.shapes import dims_of, is_size, parse_size, point_label, size_at


class CaptureError(RunError):
    """An op cannot be captured."""


class Counters(msgspec.Struct):
    """How calls were served since the capture."""

    full: int = 0
    piecewise: int = 0
    compiled: int = 0
    """Without a graph."""
    padding: int = 0
    """Rows that were added, in all."""


@dataclass(eq=False)
class Wish:
    """A size to capture."""

    mode: Mode
    size: dict[str, int]
    """Full: values of all dimensions; piecewise: of some."""
    factory: StepFactory
    step: Step
    captured: tuple[bool, ...] = ()
    """Piecewise: which of the step's calls of a piece have fixed shapes."""
    wanted: bool = False
    """A call could have used it before it was recorded."""
    graph: _Graph | None = None

    @property
    def label(self) -> str:
        """`full num_tokens=8`."""
        return f"{self.mode} {point_label(self.size)}"


@dataclass(frozen=True)
class _Graph:
    run: Callable[..., Any]
    """Replays on what is in the static buffers, takes the arguments that have none, and gives the result."""
    views: Views


class Graphs:
    """All that is captured of one program: its sizes share static inputs and a memory pool."""

    def __init__(
        self, inputs: Sequence[Input], results: Sequence[Tensor], weights: Mapping[str, torch.Tensor],
        bound: Mapping[str, torch.Tensor], bound_sizes: Mapping[str, int], written: Sequence[torch.Tensor],
        wishes: Sequence[Wish], recorder: Callable[[], Recorder], *, copy: bool,
        failures: Mapping[Mode, str] = MappingProxyType({}), memory_limit: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            inputs: of the program, in order.
            results: of the program, in order.
            weights: weights and constants by name, in the order in which steps take them.
            bound: inputs that do not come with each call.
            bound_sizes: values of the dimensions that these have.
            written: tensors that the program writes into, and that are to be as before after a capture.
            wishes: what may be captured.
            recorder: makes what records, with a memory pool of its own.
            copy: whether results are copied, so that they stay as they are at the next call.
            failures: why there is no graph of a mode that was wished for.
            memory_limit: bytes that graphs may take.

        Raises:
            RunError: the program writes into an input that comes with each call.
        """
        self.inputs, self.results, self.copy = inputs, results, copy
        self._make_recorder, self.recorder = recorder, recorder()
        self._limit, self._total = memory_limit, 0
        self._sizes = dict(bound_sizes)
        self.failures = dict(failures)
        self.counters = Counters()
        self.recorded: list[Recorded] = []
        self.wishes = sorted(wishes, key=lambda wish: (wish.mode, -math.prod(wish.size.values())))
        own = [entry for entry in inputs if not entry.bound]
        for entry in own:
            if entry.mutated:
                raise RunError(
                    f"the program writes into input {entry.name}, which a replay would do to a copy of it",
                    "declare the input with `bound: true`, and hand it over with program.bind_inputs",
                )
        self._weights, self._bound = dict(weights), dict(bound)
        self._static = StaticInputs(own, [self._sizes | wish.size for wish in wishes], self.recorder.device)
        names = (name for entry in own for name in dims_of(entry.shape) if name not in self._sizes)
        self._dims = list(dict.fromkeys(names))
        self._places = [_place(inputs, name) for name in self._dims]
        self._own = [position for position, entry in enumerate(inputs) if not entry.bound]
        self._written = list(written)
        self._names = [*self._weights, *self._bound]
        self._tensors = [*self._weights.values(), *self._bound.values()]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._unpadded: dict[Mode, str] = {}
        if not results or not all(is_size(part) for tensor in results for part in tensor.shape):
            refusal = "how the results' sizes follow from the dimensions is not known"
            self._unpadded = {"full": refusal, "piecewise": refusal}
        for wish in self.wishes:
            if refusal := self._static.unpadded(wish.size):
                self._unpadded.setdefault(wish.mode, refusal)
        self._served: dict[tuple[int, ...], tuple[Wish | None, Choice]] = {}

    def record(self, *, marked: bool = False, known: Mapping[str, int] = MappingProxyType({})) -> list[Recorded]:
        """Capture what is not yet, the largest size first: smaller ones then fit into its memory.

        With a memory limit, sizes are left out from the largest on until one fits; then small ones come first, which
        gain the most, until the limit is met.

        Args:
            marked: only what a call could have used.
            known: bytes that sizes took at an earlier capture, by `Wish.label`: what is too large is not tried.

        Raises:
            CaptureError: an op cannot be captured; its line of the program and the size are named. It is not tried
                again.
            RunError: out of memory.
        """
        waiting = [wish for wish in self.wishes if wish.graph is None and (wish.wanted or not marked)]
        before = len(self.recorded)
        kept = [(tensor, tensor.clone()) for tensor in self._written]
        try:
            while waiting:
                with self.recorder.session():
                    self._free = self.recorder.free_bytes()
                    waiting = self._record_all(waiting, known)
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)
            self._served.clear()
        return self.recorded[before:]

    def _record_all(self, waiting: list[Wish], known: Mapping[str, int]) -> list[Wish]:
        """Record until all is done, or the first graph is too large: then its pool has to go, and the rest is left."""
        limit, ascending = self._limit, False
        while waiting:
            wish = waiting.pop(0)
            if limit is not None and not self.recorded and known.get(wish.label, 0) > limit:
                continue
            try:
                entry = self._record(wish)
            except CaptureError as error:
                self.wishes.remove(wish)
                self.failures.setdefault(wish.mode, error.message)
                raise
            if limit is not None and self._total + entry.bytes > limit:
                wish.graph, wish.wanted = None, False
                if self.recorded:
                    return []
                self.recorder = self._make_recorder()
                return waiting
            self._total += entry.bytes
            self.recorded.append(entry)
            if limit is not None and not ascending:
                waiting.reverse()
                ascending = True
        return []

    def _record(self, wish: Wish) -> Recorded:
        start = time.perf_counter()
        views = self._static.views(self._sizes | wish.size)
        arguments = self._arguments(wish, views)
        try:
            record = self._full if wish.mode == "full" else self._piecewise
            run, result = record(wish, arguments)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"{point_label(wish.size)} cannot be captured: the GPU has no memory left",
                "capture fewer sizes, or give a memory_limit",
            ) from error
        except Exception as error:
            raise _failed(wish, error) from error
        if not _torch_run.only_tensors(result):
            self._unpadded.setdefault(wish.mode, "a result is no tensor")
        wish.graph = _Graph(run, views)
        before, self._free = self._free, self.recorder.free_bytes()
        grown = before - self._free
        return Recorded(dict(wish.size), wish.mode, max(0, grown), time.perf_counter() - start)

    def _arguments(self, wish: Wish, views: Views) -> list[torch.Tensor]:
        """What the step is recorded with: static buffers, bound inputs, and the least of what has no fixed size."""
        given = iter(views)
        found = []
        for entry in self.inputs:
            view = None if entry.bound else next(given)
            if entry.bound:
                view = self._bound[entry.name]
            elif view is None:
                least = dict.fromkeys(dims_of(entry.shape), 1) | self._sizes | wish.size
                shape = [size_at(part, least) for part in entry.shape]
                view = stand_in(entry, shape, self.recorder.device)
            found.append(view)
        return found

    def _full(self, wish: Wish, arguments: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], Any]:
        replay, result = self.recorder.record(lambda: wish.step(*arguments), wish.step)
        result = _torch_run.without_owner(result)  # smaller sizes use its memory as well

        def run(_: Sequence[torch.Tensor | None]) -> Any:
            replay()
            return result

        return run, result

    def _piecewise(self, wish: Wish, arguments: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], Any]:
        step = Piecewise(wish.factory, list(self._weights.values()), wish.captured, self.recorder)
        moving = {
            position
            for position, entry in enumerate(self.inputs)
            if not entry.bound and not set(dims_of(entry.shape)) <= self._sizes.keys() | wish.size.keys()
        }
        static = [tensor for position, tensor in enumerate(arguments) if position not in moving]
        result = step.record(arguments, [*static, *self._tensors])
        fixed = [None if position in moving else tensor for position, tensor in enumerate(arguments)]

        def run(inputs: Sequence[torch.Tensor]) -> Any:
            return step(*(given if at is None else at for at, given in zip(fixed, inputs, strict=True)))

        return run, result

    def serving(self, step: Step) -> Step:
        """`step`, by a graph where there is one for the sizes of its arguments, or one that they can be padded to."""
        places, served, counters = self._places, self._served, self.counters

        def call(*inputs: torch.Tensor) -> Any:
            key = tuple([inputs[position].shape[axis] for position, axis in places])
            wish, choice = served.get(key) or self._serve(key)
            if wish is None or wish.graph is None:
                counters.compiled += 1
                return step(*inputs)
            return self._replay(wish, wish.graph, choice, key, inputs)

        return call

    def choose(self, sizes: Mapping[str, int]) -> Choice:
        """What serves a batch of these sizes now."""
        return choose(self._batch(tuple(sizes[name] for name in self._dims)), self._captured(self._recorded()))

    def _serve(self, key: tuple[int, ...]) -> tuple[Wish | None, Choice]:
        """Choose once for each combination of sizes. One that is not recorded yet is marked, and not used."""
        batch, recorded = self._batch(key), self._recorded()
        choice = choose(batch, self._captured(recorded))
        best = choose(batch, self._captured(self.wishes))
        for wish in self.wishes:
            if wish.graph is None and wish.mode == best.mode and wish.size == best.size:
                wish.wanted = True
        found = next((w for w in recorded if w.mode == choice.mode and w.size == choice.size), None)
        if len(self._served) >= REMEMBERED:
            self._served.clear()
        self._served[key] = found, choice
        return found, choice

    def _batch(self, key: tuple[int, ...]) -> BatchDescriptor:
        return BatchDescriptor(dict(zip(self._dims, key, strict=True)))

    def _recorded(self) -> list[Wish]:
        return [wish for wish in self.wishes if wish.graph is not None]

    def _captured(self, wishes: Iterable[Wish]) -> Captured:
        sizes: dict[Mode, tuple[dict[str, int], ...]] = {}
        for wish in wishes:
            sizes[wish.mode] = (*sizes.get(wish.mode, ()), wish.size)
        return Captured(sizes, self._unpadded, self.failures)

    def _replay(
        self, wish: Wish, graph: _Graph, choice: Choice, key: tuple[int, ...], inputs: Sequence[torch.Tensor]
    ) -> Any:
        if list(map(torch.Tensor.data_ptr, self._tensors)) != self._addresses:
            raise self._moved()
        self._static.fill(graph.views, [inputs[position] for position in self._own])
        result = graph.run(inputs)
        if wish.mode == "full":
            self.counters.full += 1
        else:
            self.counters.piecewise += 1
        if choice.padding:
            self.counters.padding += choice.padding
        if choice.size and any(choice.size.get(n, v) != v for n, v in zip(self._dims, key, strict=True)):
            result = self._cut(result, dict(zip(self._dims, key, strict=True)))
        return _torch_run.tree_map(torch.clone, result) if self.copy else result

    def _cut(self, result: Any, sizes: Mapping[str, int]) -> Any:
        """The results of the rows that are real."""
        shapes = iter(self.results)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            for axis, part in enumerate(next(shapes).shape):
                if isinstance(part, str) and parse_size(part)[0] in sizes:
                    tensor = tensor.narrow(axis, 0, size_at(part, sizes))
            return tensor

        return _torch_run.tree_map(cut, result)

    def _moved(self) -> RunError:
        places = zip(self._names, self._tensors, self._addresses, strict=True)
        names = [name for name, tensor, address in places if tensor.data_ptr() != address]
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return RunError(
            f"{names[0]}{more} has moved since the graphs were captured: a replay would read the old place",
            "change values in place (tensor.copy_), or bind and capture again",
        )


REMEMBERED = 1 << 16
"""Combinations of sizes whose choice is kept."""


def _place(inputs: Sequence[Input], dim: str) -> tuple[int, int]:
    """Position of an input that has the dimension as a size by itself, and the axis."""
    for position, entry in enumerate(inputs):
        for axis, part in enumerate(entry.shape):
            if not entry.bound and parse_size(part) == (dim, 0):
                return position, axis
    raise AssertionError(f"no input has {dim}")  # spec.py has seen to it


def _failed(wish: Wish, error: Exception) -> CaptureError:
    """The line of the stitched program names the piece or op."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith("_code.py")]
    line = (frames[-1].line or "").partition("  #")[0] if frames else ""
    where = f" at line {frames[-1].lineno} of {frames[-1].filename}, `{line}`" if frames else ""
    what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return CaptureError(
        f"{point_label(wish.size)} cannot be captured{where}: {what}",
        "capture piecewise, with the op among partition.splitting_ops, or serve with cudagraph.mode none"
        if wish.mode == "full"
        else "serve it with cudagraph.mode none",
    )
