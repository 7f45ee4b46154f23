"""What a build would compile, and how long that takes, going by an artifact that was built before."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fxc.cache import Artifact
from fxc.manifest import Binary, Manifest
from fxc.shapes import Range
from fxc.spec import Spec


class Needed(msgspec.Struct, frozen=True):
    """A binary that would be compiled."""

    piece: str
    """`piece_0 num_tokens=8`."""
    seconds: float | None
    """What one like it took."""


def expected(spec: Spec, manifest: Manifest, only_sizes: bool) -> tuple[Needed, ...]:
    """The pieces of an artifact for the sizes and ranges of `spec`; with `only_sizes`, for those that it lacks."""
    if not spec.compile.level or not manifest.binaries:
        return ()
    spec = msgspec.structs.replace(manifest.spec, compile=spec.compile, dims={**manifest.spec.dims, **spec.dims})
    there = {program.range.label for program in manifest.programs} if only_sizes else set()
    pieces = {piece.unique: piece for step in manifest.pieces.values() for piece in step if piece.kind == "compiled"}
    found: dict[str, Needed] = {}
    for box in (*spec.sizes(), *spec.ranges()):
        for piece in pieces.values() if box.label not in there else ():
            shape = Range(tuple(bound for bound in box.bounds if bound[0] in piece.dims)).label
            known = [binary for binary in manifest.binaries.values() if binary.piece == piece.unique]
            found.setdefault(f"{piece.name} {shape}", Needed(f"{piece.name} {shape}", like(known, shape)))
    return tuple(found.values())


def label(manifest: Manifest, binary: Binary) -> str:
    """`piece_0 num_tokens=8`."""
    return f"{_piece(manifest, binary)} {binary.range}"


def _piece(manifest: Manifest, binary: Binary) -> str:
    names = (piece.name for step in manifest.pieces.values() for piece in step if piece.unique == binary.piece)
    return next(names, binary.piece[:12])


def like(known: Iterable[Binary], shape: str) -> float | None:
    """Seconds that binaries of the same range took on average; of all, if there is none."""
    known = [*known]
    same = [binary.seconds for binary in known if binary.range == shape] or [binary.seconds for binary in known]
    return sum(same) / len(same) if same else None


def estimate(near: Artifact | None, needed: tuple[Needed, ...], trace: float) -> float | None:
    """`trace` seconds, and of the nearest artifact's compiling and proving as much as has to be done
    again, with as many jobs as it had. None where it has no timings for that."""
    if near is None or any(entry.seconds is None for entry in needed):
        return None
    phases = near.manifest.seconds
    rest = phases.get("compile", 0.0) + phases.get("prove", 0.0)
    whole = sum(binary.seconds for binary in near.manifest.binaries.values())
    again = sum(entry.seconds or 0.0 for entry in needed)
    return trace + (rest * again / whole if whole else 0.0)
