"""CUDA graphs: one call of the whole program, recorded for a size and replayed.

A replay reads and writes the addresses of the recording. Arguments of the call are copied into static buffers first;
all sizes share these, as only one replays at a time. Weights and bound inputs are read where they lie. Results lie in
the graphs' memory pool and are overwritten by the next replay of any size.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from fxc import _torch_run
from fxc.errors import RunError
from fxc.manifest import Input, Tensor
from fxc.shapes import dims_of, is_size, parse_size, point_label, size_at

Step = Callable[..., Any]


class Recorded(msgspec.Struct, frozen=True):
    """One captured size."""

    size: dict[str, int]
    bytes: int
    """What the memory reserved on the GPU grew by."""
    seconds: float


@dataclass(frozen=True)
class Wish:
    """A size to capture."""

    point: dict[str, int]
    """Of all dimensions."""
    step: Step


class Graphs:
    """The captured sizes of one program, which share static inputs, a memory pool, and a turn to run."""

    def __init__(
        self, inputs: Sequence[Input], results: Sequence[Tensor], held: Mapping[str, torch.Tensor],
        written: Collection[str], device: torch.device, *, copy: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            inputs: of the program, in order.
            results: of the program, in order.
            held: what the program reads where it lies, by name: weights, constants, bound inputs.
            written: names of weights and constants that it writes into.
            copy: whether results are copied, so that they stay as they are at the next call.
        """
        self.inputs, self.results, self.held = inputs, results, dict(held)
        self.device, self.copy = device, copy
        self.recorded: list[Recorded] = []
        self.own = [entry for entry in inputs if not entry.bound]
        self.positions = [position for position, entry in enumerate(inputs) if not entry.bound]
        self.dims = list(dict.fromkeys(name for entry in self.own for name in dims_of(entry.shape)))
        plain = all(is_size(part) for tensor in results for part in tensor.shape)
        self.pads = bool(results) and plain and all(entry.pad is not None for entry in self.own)
        for entry in self.own:
            if entry.mutated:
                raise RunError(
                    f"the program writes into input {entry.name}, which a replay would do to a copy of it",
                    "declare the input with `bound: true`, and hand it over with program.bind_inputs",
                )
        self._written = [tensor for name, tensor in held.items() if name in written]
        self._tensors = list(self.held.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._busy = threading.Lock()
        self._memory: dict[str, torch.Tensor] = {}
        self._graphs: dict[tuple[int, ...], _Graph] = {}

    def record(self, wishes: Sequence[Wish]) -> None:
        """Capture every size, the largest first: smaller ones then fit into its memory.

        Raises:
            RunError: an op cannot be captured; its line of the program and the size are named.
        """
        for entry in self.own:
            most = max(math.prod(size_at(part, wish.point) for part in entry.shape) for wish in wishes)
            pad = entry.pad if isinstance(entry.pad, int) else 0  # what is recorded runs: pad rows write no cache
            self._memory[entry.name] = torch.full((most,), pad, dtype=getattr(torch, entry.dtype), device=self.device)
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device), torch.no_grad():
            stream = torch.cuda.Stream()
            for wish in sorted(wishes, key=lambda wish: -math.prod(wish.point.values())):
                self._record(wish, pool, stream)

    def _record(self, wish: Wish, pool: Any, stream: torch.cuda.Stream) -> None:
        start, before = time.perf_counter(), torch.cuda.memory_reserved()
        kept = [(tensor, tensor.clone()) for tensor in self._written]
        buffers = [
            self._memory[entry.name][: math.prod(shape)].view(shape)
            for entry in self.own
            for shape in [[size_at(part, wish.point) for part in entry.shape]]
        ]
        given = iter(buffers)
        arguments = [self.held[entry.name] if entry.bound else next(given) for entry in self.inputs]
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            try:
                wish.step(*arguments)  # loads kernels and makes workspaces, which cannot be done while recording
                stream.synchronize()
                # Not torch.cuda.graph: it collects garbage and empties the allocator's cache for each graph.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = wish.step(*arguments)
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            except Exception as error:
                raise _failed(wish.point, error) from error
            for tensor, value in kept:
                tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        self.pads = self.pads and _torch_run.only_tensors(result)
        result = _torch_run.without_owner(result)  # smaller sizes use its memory as well
        self._graphs[self._key(wish.point)] = _Graph(dict(wish.point), graph.replay, graph, buffers, result)
        grown = torch.cuda.memory_reserved() - before
        self.recorded.append(Recorded(dict(wish.point), grown, time.perf_counter() - start))

    def _key(self, point: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(point[name] for name in self.dims)

    def serving(self, step: Step) -> Step:
        """`step`, by a graph where there is one for the sizes of its arguments, or one that they can be padded to."""
        places = [_place(self.inputs, name) for name in self.dims]
        exact = self._graphs.get

        def call(*inputs: torch.Tensor) -> Any:
            key = tuple(inputs[position].shape[axis] for position, axis in places)
            graph = exact(key)
            if graph is None and self.pads:
                graph = self._next(key)
            return step(*inputs) if graph is None else self._replay(graph, key, inputs)

        return call

    def _next(self, key: tuple[int, ...]) -> _Graph | None:
        """The smallest captured size that holds `key` and whose dimensions are as far above it each: a batch in which
        every request has one token is padded by requests with one token."""
        best = None
        for captured, graph in self._graphs.items():
            more = {high - low for high, low in zip(captured, key, strict=True)}
            if len(more) == 1 and min(more) > 0 and (best is None or captured < self._key(best.point)):
                best = graph
        return best

    def _replay(self, graph: _Graph, key: tuple[int, ...], inputs: Sequence[torch.Tensor]) -> Any:
        if not self._busy.acquire(blocking=False):
            raise RunError(
                "another thread is in this program: a replay overwrites what the other one reads",
                "call it from one thread at a time, or load it once for each",
            )
        try:
            if list(map(torch.Tensor.data_ptr, self._tensors)) != self._addresses:
                raise self._moved()
            given = [inputs[position] for position in self.positions]
            if key == self._key(graph.point):
                _torch_run.copy_all(graph.buffers, given)
                graph.replay()
                result = graph.result
            else:
                self._pad(graph, given)
                graph.replay()
                result = self._cut(graph, dict(zip(self.dims, key, strict=True)))
            return _torch_run.tree_map(torch.clone, result) if self.copy else result
        finally:
            self._busy.release()

    def _pad(self, graph: _Graph, given: Sequence[torch.Tensor]) -> None:
        heads = [buffer[: len(tensor)] for buffer, tensor in zip(graph.buffers, given, strict=True)]
        _torch_run.copy_all(heads, given)
        for entry, buffer, tensor in zip(self.own, graph.buffers, given, strict=True):
            if len(buffer) > len(tensor):
                rest = buffer[len(tensor) :]
                rest.fill_(entry.pad) if isinstance(entry.pad, int) else rest.copy_(tensor[-1:])

    def _cut(self, graph: _Graph, point: Mapping[str, int]) -> Any:
        """The results of the rows that are real."""
        shapes = iter(self.results)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            for axis, part in enumerate(next(shapes).shape):
                if isinstance(part, str) and parse_size(part)[0] in point:
                    tensor = tensor.narrow(axis, 0, size_at(part, point))
            return tensor

        return _torch_run.tree_map(cut, graph.result)

    def _moved(self) -> RunError:
        names = [name for name, a in zip(self.held, self._addresses, strict=True) if self.held[name].data_ptr() != a]
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return RunError(
            f"{names[0]}{more} has moved since the graphs were captured: a replay would read the old place",
            "change values in place (tensor.copy_), or bind and capture again",
        )


@dataclass(frozen=True)
class _Graph:
    point: dict[str, int]
    replay: Callable[[], None]
    owner: torch.cuda.CUDAGraph
    buffers: list[torch.Tensor]
    result: Any


def _place(inputs: Sequence[Input], dim: str) -> tuple[int, int]:
    """Position of an input that has the dimension as a size by itself, and the axis."""
    for position, entry in enumerate(inputs):
        for axis, part in enumerate(entry.shape):
            if not entry.bound and parse_size(part) == (dim, 0):
                return position, axis
    raise AssertionError(f"no input has {dim}")  # spec.py has seen to it


def _failed(point: Mapping[str, int], error: Exception) -> RunError:
    """The line of the stitched program names the piece or op."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith("_code.py")]
    where = f" at line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
    return RunError(
        f"{point_label(point)} cannot be captured{where}: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
        "serve it with cudagraph.mode none, or leave the op out of the program",
    )
