"""Which sizes of a program get which kind of graph. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fxc.capture_plan import Mode
from fxc.errors import InputError
from fxc.manifest import Manifest
from fxc.shapes import Range, point_label, select, whole
from fxc.spec import CudagraphSpec, Spec, named_values


class Chosen(NamedTuple):
    """A size to capture."""

    mode: Mode
    size: dict[str, int]
    """Full: values of all dimensions; piecewise: of some."""
    program: int
    """Which of the programs serves it."""
    fixed: tuple[bool, ...]
    """For each call of a piece, whether the size fixes all its shapes."""


def listed(
    spec: Spec, cudagraph: CudagraphSpec, ranges: Sequence[Range], bound: Mapping[str, int] | None,
    sizes: Iterable[int | Mapping[str, int]] | None, mode: str,
) -> list[dict[str, int]]:  # fmt: skip
    """The sizes to capture, by name: those given, or `cudagraph.sizes`, or `compile.sizes`.

    Args:
        bound: values of the dimensions that bound inputs have.

    Raises:
        InputError: a given size names an unknown dimension, or leaves one free where whole steps are wanted.
    """
    names = [name for name, _, _ in ranges[0].bounds if name not in (bound or {})]
    default = spec.compile.sizes if cudagraph.sizes is None else cudagraph.sizes
    given = default if sizes is None else [n if isinstance(n, int) else dict(n) for n in sizes]
    named = named_values(spec, given, "sizes") if names else [{}]
    for size in named if sizes is not None else ():
        odd = size.keys() - set(names)
        if mode == "full" and spec.kv_cache is None:
            odd = set(names) ^ size.keys()
        if odd:
            raise InputError(
                f"sizes: {point_label(size)} is no size to capture: {', '.join(sorted(odd))}",
                f"give a value of each of {', '.join(names)}",
            )
    return [{name: size[name] for name in names if name in size} for size in named]


def choose(
    manifest: Manifest, ranges: Sequence[Range], bound: Mapping[str, int] | None, sizes: Sequence[dict[str, int]],
    mode: str,
) -> list[Chosen]:  # fmt: skip
    """Graphs of whole steps for sizes that fix all dimensions, of pieces for those that leave some free.

    Raises:
        InputError: no program serves a size.
    """
    bound = bound or {}
    names = {name for name, _, _ in ranges[0].bounds} - bound.keys()
    steps = [size for size in sizes if size.keys() == names] if mode != "piecewise" else []
    parts = [size for size in sizes if not any(other.items() < size.items() for other in sizes)]
    kinds: list[tuple[Mode, dict[str, int]]] = [("full", size) for size in steps]
    kinds += [("piecewise", size) for size in parts if size not in steps and mode != "full"]
    found: dict[tuple[Mode, str], Chosen] = {}
    for kind, size in kinds:
        index = _program_for(ranges, {**size, **bound})
        if index is not None:
            calls = manifest.pieces.get(manifest.programs[index].step, ())
            known = size.keys() | bound.keys()
            fixed = tuple(known >= set(call.dims) for call in calls if call.kind == "compiled")
            if kind == "full" or any(fixed):
                found[kind, point_label(size)] = Chosen(kind, size, index, fixed)
    return list(found.values())


def _program_for(ranges: Sequence[Range], values: Mapping[str, int]) -> int | None:
    """Which program serves every batch with these values, whatever the others are; None where several do.

    Raises:
        InputError: none serves any.
    """
    bounds = whole(ranges)
    lowest, highest = ({**{name: ends[side] for name, ends in bounds.items()}, **values} for side in (0, 1))
    select(ranges, lowest)
    found = [index for index, box in enumerate(ranges) if box.contains(lowest) and box.contains(highest)]
    return min(found, key=lambda index: ranges[index].free) if found else None
