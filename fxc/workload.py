"""What a benchmark runs: which sizes, and weights and inputs for them, all made up."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch

from fxc.errors import InputError, UsageError
from fxc.manifest import Manifest
from fxc.ready import make_input, make_weight, point_for
from fxc.runtime import PagedCache, Program
from fxc.runtime import Sequence as Cached
from fxc.shapes import dims_of, out_of_bounds, point_label
from fxc.spec import REQUESTS, TOKENS

CONTEXT = 1024
"""Tokens that each request of a decode batch has in the cache, where as many fit."""
BLOCKS = "num_blocks"
Point = dict[str, int]


def own_dims(manifest: Manifest) -> list[str]:
    """The dimensions that each call chooses: those of bound inputs are chosen once."""
    fixed = {name for entry in manifest.inputs if entry.bound for name in dims_of(entry.shape)}
    return [name for name, _, _ in manifest.programs[0].range.bounds if name not in fixed]


def points(manifest: Manifest, wanted: Sequence[int | Mapping[str, int]] | None = None) -> list[Point]:
    """The sizes to run, by dimension, smallest first: `wanted`, or those of the program (below level 2, those that it
    would have) and one that is none of them.

    A size of a program with `kv_cache` is a number of requests that decode one token each.

    Raises:
        UsageError: a size that names other dimensions, or that no program serves.
    """
    names = own_dims(manifest)
    if wanted is not None:
        found = [_named(manifest, names, size) for size in wanted]
    elif manifest.spec.kv_cache is not None or len(names) == 1:
        compiled = manifest.sizes or manifest.spec.compile.sizes
        listed = [size if isinstance(size, int) else size.get(names[0]) for size in compiled]
        low, high = _bounds(manifest, names)
        values = {value for value in listed if value is not None and low <= value <= high}
        other = between(values, low, high)
        found = [dict.fromkeys(names, value) for value in {*values, *([] if other is None else [other])}]
    else:
        boxes = [program.range for program in manifest.programs]
        spots = [point_for(box, [other for other in boxes if other.free < box.free]) for box in boxes]
        found = [{name: spot[name] for name in names} for spot in spots if spot is not None]
    unique = {tuple(point.items()): point for point in found}
    return sorted(unique.values(), key=lambda point: (tokens(manifest, point), *point.values()))


def between(sizes: set[int], low: int, high: int) -> int | None:
    """A value within the bounds that is none of `sizes`, between the two largest where there is room; None where sizes
    are all there is.

    >>> between({1, 8, 64}, 1, 4096), between({1}, 1, 4096), between({1, 2}, 1, 2)
    (36, 2, None)
    """
    *_, before, last = (low, low, *sorted(sizes))
    start = max((before + last) // 2, low)
    ahead = (value for value in range(start, min(start + len(sizes), high) + 1) if value not in sizes)
    behind = (value for value in range(start, max(start - len(sizes), low) - 1, -1) if value not in sizes)
    return next(ahead, next(behind, None))


def tokens(manifest: Manifest, point: Mapping[str, int]) -> int:
    """Rows that a call computes: tokens, for a language model."""
    return point[TOKENS] if manifest.spec.kv_cache is not None else math.prod(point.values())


def _bounds(manifest: Manifest, names: Sequence[str]) -> tuple[int, int]:
    """What all of these dimensions can be at once."""
    bounds = [(low, high) for p in manifest.programs for name, low, high in p.range.bounds if name in names]
    highs = [max(high for p in manifest.programs for n, _, high in p.range.bounds if n == name) for name in names]
    return max(1, min(low for low, _ in bounds)), min(highs)


def _named(manifest: Manifest, names: Sequence[str], size: int | Mapping[str, int]) -> Point:
    if isinstance(size, int):
        if manifest.spec.kv_cache is None and len(names) != 1:
            example = ",".join(f"{name}={size}" for name in names)
            hint = f"write {example}" if names else "leave --sizes out: the program has one static shape"
            raise UsageError(f"size {size} does not say which dimension; there are {len(names)}", hint)
        size = dict.fromkeys(names, size)
    if size.keys() != set(names) or (manifest.spec.kv_cache is not None and len({*size.values()}) > 1):
        hint = "write a number of requests that decode one token each"
        if manifest.spec.kv_cache is None:
            hint = f"give a value of each of {', '.join(names)}" if names else "leave --sizes out"
        raise UsageError(f"size {point_label(size)} is none of this program", hint)
    point = {name: size[name] for name in names}
    ranges = [program.range for program in manifest.programs]
    if not any(all(low <= point.get(name, low) <= high for name, low, high in box.bounds) for box in ranges):
        error: InputError = out_of_bounds(ranges, point)
        raise UsageError(f"size {point_label(point)}: {error.message}", "choose a size within the bounds")
    return point


class Workload:
    """A program's weights, its bound inputs and what its calls are given, on its device."""

    def __init__(self, program: Program, sizes: Sequence[Point], context: int | None = None) -> None:
        """Make weights and bound inputs, and bind them to `program`.

        Args:
            sizes: all that `inputs` will be asked for.
            context: tokens that each request has in a paged cache; by default 1024, or as many as fit.

        Raises:
            UsageError: that many do not fit.
        """
        self.manifest = program.manifest
        self.device = program.device
        self._random = torch.Generator(program.device).manual_seed(0)
        self.weights = {weight.name: make_weight(weight, self._random) for weight in self.manifest.weights}
        program.bind(self.weights)
        self.cache: PagedCache | None = None
        self.context: int | None = None
        self._requests: list[Cached] = []
        if self.manifest.spec.kv_cache is not None:
            self._fill(program, max(point[TOKENS] for point in sizes), context)
        self.bound = self.cache.tensors if self.cache else self._made_up(bound=True, point=self._low())
        if self.bound and not self.cache:
            program.bind_inputs(self.bound)
        written = {weight.name for weight in self.manifest.weights if weight.mutated}
        written |= {entry.name for entry in self.manifest.inputs if entry.mutated}
        # What decoding writes into the cache depends on the call alone: it can be done again.
        state = self.weights if self.cache else {**self.weights, **self.bound}
        self._kept = [(tensor, tensor.clone()) for name, tensor in state.items() if name in written]

    def bind(self, program: Program) -> None:
        """Bind the same tensors to another load of the program."""
        program.bind(self.weights)
        if self.bound:
            program.bind_inputs(self.bound)

    def restore(self) -> None:
        """Undo what calls have written into weights and bound inputs."""
        for tensor, value in self._kept:
            tensor.copy_(value)

    def inputs(self, point: Point) -> dict[str, torch.Tensor]:
        """Arguments of a call at `point`."""
        if self.cache is None:
            return self._made_up(bound=False, point=point)
        requests = self._requests[: point[REQUESTS]]
        (entry,) = (entry for entry in self.manifest.inputs if entry.name == "input_ids")
        ids = make_input(entry, point, self._random).tolist()
        made = self.cache.batch([(request, [token]) for request, token in zip(requests, ids, strict=True)])
        for request in requests:
            request.length -= 1  # the next size begins at the same place
        return made

    def bytes_read(self, point: Point, gathered: Mapping[str, int]) -> int:
        """Bytes of weights and of paged caches that a call at `point` has to read.

        Args:
            gathered: weights of which a row is looked up for each token, and how many times.
        """
        rows = tokens(self.manifest, point)
        total = 0
        for name, tensor in self.weights.items():
            row = tensor.nbytes // max(len(tensor), 1) if tensor.ndim else 0
            total += min(tensor.nbytes, rows * row * gathered[name]) if name in gathered else tensor.nbytes
        if self.cache and self.context is not None:
            slots = self.cache.num_blocks * self.cache.block_size
            total += self.cache.bytes * rows * (self.context + 1) // slots
        return total

    def _low(self) -> Point:
        return {name: max(low, min(1, high)) for name, low, high in self.manifest.programs[-1].range.bounds}

    def _made_up(self, *, bound: bool, point: Point) -> dict[str, torch.Tensor]:
        entries = [entry for entry in self.manifest.inputs if entry.bound == bound]
        return {entry.name: make_input(entry, {**self._low(), **point}, self._random) for entry in entries}

    def _fill(self, program: Program, requests: int, context: int | None) -> None:
        """A cache in which each request has `context` tokens, and room for one more."""
        most, blocks = room(self.manifest, requests, _memory(self.device))
        if context is not None and context > most:
            raise UsageError(f"--context {context} does not fit, expected at most {most} for {requests} requests")
        self.context = min(CONTEXT, most) if context is None else context
        assert self.manifest.spec.kv_cache is not None
        each = -(-(self.context + 1) // self.manifest.spec.kv_cache.block_size)
        self.cache = PagedCache(program, max(each * requests, blocks))
        for tensor in self.cache.tensors.values():
            tensor.copy_(torch.randn(tensor.shape[1:], generator=self._random, device=self.device))
        chunk = self.manifest.spec.dims[TOKENS].max if TOKENS in self.manifest.spec.dims else self.context
        self._requests = [Cached() for _ in range(requests)]
        for request in self._requests:
            while (rest := self.context - request.length) > 0:
                self.cache.batch([(request, [0] * min(rest, chunk))])


def room(manifest: Manifest, requests: int, memory: int) -> tuple[int, int]:
    """How many tokens each of so many requests can have in a cache beside the one that it decodes, and how many blocks
    a cache has at least.

    Args:
        memory: bytes that the cache may take.

    Raises:
        UsageError: not even one block for each.
    """
    assert manifest.spec.kv_cache is not None
    size = manifest.spec.kv_cache.block_size
    by_name = {entry.name: entry for entry in manifest.inputs}
    per_block = sum(
        math.prod(int(part) for part in entry.shape[1:]) * getattr(torch, entry.dtype).itemsize
        for entry in manifest.inputs
        if entry.bound
    )
    bounds = [(low, high) for p in manifest.programs for name, low, high in p.range.bounds if name == BLOCKS]
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    each = min(high, memory // per_block) // requests
    if not each:
        raise UsageError(f"{requests} requests do not fit into a cache here", "choose a smaller size")
    positions = by_name["positions"].values
    longest = int(positions[1]) if positions else int(by_name["block_table"].shape[1]) * size
    return min(each * size, longest) - 1, low


def _memory(device: torch.device) -> int:
    """Bytes that a cache may take: half of what a GPU has free, a quarter of what the machine has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4
