"""What a page shows, out of a manifest and the printed sources, in the order of the page. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fxc.cli.page.fold import Names, Repeated, fold, merge
from fxc.cli.page.pieces import Site, Splitting, UniquePiece, sites, splitting_ops, unique_pieces
from fxc.cli.page.proof import Axis, Compared, Point, axis, compared, largest
from fxc.cli.page.source import graphs, origins
from fxc.manifest import Binary, Manifest, Tensor

PHASES = ("trace", "partition", "compile", "prove")
"""In the order in which they are shown; the manifest may have more."""


class Block(NamedTuple):
    """A call in the picture of a step."""

    name: str
    title: str
    hue: float | None
    """Degrees; None for an op that runs as itself."""


class Step(NamedTuple):
    name: str
    serves: tuple[str, ...]
    calls: tuple[Block, ...]
    formula: tuple[Repeated, ...]
    """Of names."""


class Built(NamedTuple):
    """A binary."""

    key: str
    piece: str
    binary: Binary
    bytes: float
    seconds: float
    """Both in percent of the largest."""


class Phase(NamedTuple):
    name: str
    seconds: float
    percent: float


class View(NamedTuple):
    manifest: Manifest
    steps: tuple[Step, ...]
    blocks: dict[str, Block]
    """By name, one for each."""
    pieces: tuple[UniquePiece, ...]
    splitting: tuple[Splitting, ...]
    sites: tuple[Site, ...]
    binaries: tuple[Built, ...]
    phases: tuple[Phase, ...]
    axis: Axis
    proof: tuple[Compared, ...]
    weights: tuple[tuple[Names, str], ...]
    """Names and layout."""
    weight_bytes: int

    @property
    def calls(self) -> int:
        return sum(len(step.calls) for step in self.steps)

    @property
    def binary_bytes(self) -> int:
        return sum(built.binary.bytes for built in self.binaries)

    @property
    def worst(self) -> Point | None:
        points = [entry.worst for entry in self.proof if entry.points]
        return largest(points) if points else None


def view(manifest: Manifest, code: str, graph: str, pieces: str) -> View:
    """
    Args:
        code: transformed_code.py.
        graph: computation_graph.py.
        pieces: pieces.py; empty where an older build made none.
    """
    unique = unique_pieces(manifest, graphs(pieces), origins(code))
    names = {piece.digest: piece.name for piece in unique}
    hues = {piece.digest: piece.hue for piece in unique}
    steps = tuple(_step(manifest, name, hues) for name in manifest.pieces)
    scale = axis(manifest)
    return View(
        manifest=manifest,
        steps=steps,
        blocks={block.name: block for step in steps for block in step.calls},
        pieces=unique,
        splitting=splitting_ops(manifest, graphs(graph)),
        sites=sites(manifest),
        binaries=_binaries(manifest, names),
        phases=_phases(manifest.seconds),
        axis=scale,
        proof=compared(manifest, names, scale),
        weights=_weights(manifest.weights),
        weight_bytes=sum(map(_bytes, manifest.weights)),
    )


def layout(tensor: Tensor) -> str:
    """`float32[n, 256]`."""
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _step(manifest: Manifest, name: str, hues: Mapping[str, float]) -> Step:
    calls = manifest.pieces[name]
    blocks = tuple(
        Block(piece.name, f"{piece.name}, {piece.ops} ops", hues[piece.unique])
        if piece.kind == "compiled"
        else Block(piece.name, piece.name, None)
        for piece in calls
    )
    serves = tuple(program.range.label for program in manifest.programs if program.step == name)
    return Step(name, serves, blocks, tuple(fold([piece.name for piece in calls])))


def _binaries(manifest: Manifest, names: Mapping[str, str]) -> tuple[Built, ...]:
    """In the order of their pieces."""
    binaries = manifest.binaries.values()
    most_bytes = max((binary.bytes for binary in binaries), default=0) or 1
    most_seconds = max((binary.seconds for binary in binaries), default=0) or 1
    built = [
        Built(
            key=key,
            piece=names.get(binary.piece, binary.piece[:12]),
            binary=binary,
            bytes=round(100 * binary.bytes / most_bytes, 1),
            seconds=round(100 * binary.seconds / most_seconds, 1),
        )
        for key, binary in manifest.binaries.items()
    ]
    place = {digest: index for index, digest in enumerate(names)}
    return tuple(sorted(built, key=lambda entry: place.get(entry.binary.piece, len(place))))


def _phases(seconds: Mapping[str, float]) -> tuple[Phase, ...]:
    """The phases of a build, and what its total has beside them."""
    order = dict.fromkeys((*PHASES, *seconds))
    named = {name: seconds[name] for name in order if name != "total" and seconds.get(name, 0.0) > 0}
    whole = max(seconds.get("total", 0.0), sum(named.values()))
    rest = whole - sum(named.values())
    parts = {**named, "rest": rest} if rest > whole / 100 else named
    return tuple(Phase(name, took, round(100 * took / whole, 2)) for name, took in parts.items())


def _weights(weights: Iterable[Tensor]) -> tuple[tuple[Names, str], ...]:
    groups: dict[str, list[str]] = {}
    for weight in weights:
        groups.setdefault(layout(weight), []).append(weight.name)
    return tuple((names, shape) for shape, members in groups.items() for names in merge(members))


def _bytes(tensor: Tensor) -> int:
    bits = re.search(r"\d+", tensor.dtype)
    return math.prod(int(size) for size in tensor.shape) * (int(bits[0]) // 8 if bits else 1)
