"""The pieces of a program and the ops between them, each with its graph. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fxc.cli.page.fold import merge
from fxc.cli.page.lanes import Drawing, draw
from fxc.cli.page.source import Graph, Op, Origin
from fxc.manifest import Manifest, NearMiss, Piece

GOLDEN_ANGLE = 137.508
"""Degrees between the hues of two pieces: any number of them stay apart."""
FIRST_HUE = 262.0


class Site(NamedTuple):
    """What a pass found in a piece, for all ranges where it found the same."""

    name: str
    piece: str
    matches: tuple[str, ...]
    near_misses: tuple[NearMiss, ...]
    shapes: tuple[str, ...]


class UniquePiece(NamedTuple):
    """A compiled piece."""

    name: str
    digest: str
    hue: float
    ops: int
    dims: tuple[str, ...]
    calls: int
    drawing: Drawing | None
    given: Mapping[str, str]
    """By name of the input, what is handed over there."""
    sites: tuple[Site, ...]
    marks: Mapping[str, tuple[str, str]]
    """By node: match or miss, and what a pass says of it."""


class Splitting(NamedTuple):
    """An op that the graph is cut at."""

    name: str
    calls: int
    module: str
    """What registers it."""
    backend: str
    """What computes it, where there is a choice."""
    drawing: Drawing | None
    """Its first call."""


def anchor(name: str) -> str:
    """The id of a piece or splitting op on the page."""
    return name if re.fullmatch(r"piece_\d+", name) else "op-" + re.sub(r"\W+", "-", name)


def unique_pieces(
    manifest: Manifest, graphs: Mapping[str, Graph], wiring: Mapping[str, Sequence[tuple[Origin, ...]]]
) -> tuple[UniquePiece, ...]:
    """
    Args:
        graphs: by name of the piece.
        wiring: by step, where the arguments of its calls come from.
    """
    calls = [piece for step in manifest.pieces.values() for piece in step if piece.kind == "compiled"]
    found = {piece.unique: piece for piece in calls}
    given = _given(manifest, wiring)
    every = sites(manifest)
    return tuple(
        UniquePiece(
            name=piece.name,
            digest=digest,
            hue=round((FIRST_HUE + index * GOLDEN_ANGLE) % 360, 1),
            ops=piece.ops,
            dims=piece.dims,
            calls=sum(call.unique == digest for call in calls),
            drawing=draw(graphs[piece.name]) if piece.name in graphs else None,
            given=given.get(piece.name, {}),
            sites=tuple(site for site in every if site.piece == piece.name),
            marks=_marks(site for site in every if site.piece == piece.name),
        )
        for index, (digest, piece) in enumerate(found.items())
    )


def _given(manifest: Manifest, wiring: Mapping[str, Sequence[tuple[Origin, ...]]]) -> dict[str, dict[str, str]]:
    """By name of a piece and of its input, what all of its calls get there."""
    found: dict[str, list[list[Origin]]] = {}
    for step, calls in wiring.items():
        names = [piece.name for piece in manifest.pieces.get(step, ()) if piece.kind == "compiled"]
        for name, arguments in zip(names, calls, strict=False):
            columns = found.setdefault(name, [[] for _ in arguments])
            for column, origin in zip(columns, arguments, strict=False):
                made_by = re.fullmatch(r"piece_(\d+)", origin.name) if origin.kind == "result" else None
                column.append(origin._replace(name=names[int(made_by[1])]) if made_by else origin)
    return {
        name: {f"in_{index}": _told(column) for index, column in enumerate(columns)} for name, columns in found.items()
    }


def _told(column: Iterable[Origin]) -> str:
    """`layers.{0..31}.weight`, `from piece_0, fxc::attention`."""
    by_kind: dict[str, list[str]] = {}
    for origin in column:
        by_kind.setdefault(origin.kind, []).append(origin.name)
    made = by_kind.pop("result", None)
    parts = [", ".join(names.text for names in merge(names)) for names in by_kind.values()]
    return "; ".join([*parts, *([f"from {', '.join(dict.fromkeys(made))}"] if made else [])])


def sites(manifest: Manifest) -> tuple[Site, ...]:
    """Everywhere that a pass has found something."""
    found: dict[Site, list[str]] = {}
    for entry in manifest.passes:
        for site in entry.sites:
            found.setdefault(Site(entry.name, site.piece, site.matches, site.near_misses, ()), []).append(site.shape)
    return tuple(site._replace(shapes=tuple(shapes)) for site, shapes in found.items())


def _marks(sites: Iterable[Site]) -> dict[str, tuple[str, str]]:
    marks: dict[str, tuple[str, str]] = {}
    for site in sites:
        for miss in site.near_misses:
            marks.setdefault(miss.node, ("miss", f"{site.name}: {miss.reason}"))
        marks |= dict.fromkeys(site.matches, ("match", site.name))
    return marks


def splitting_ops(manifest: Manifest, traced: Mapping[str, Graph]) -> tuple[Splitting, ...]:
    """
    Args:
        traced: the graph of each step before it was cut.
    """
    eager: list[Piece] = [piece for step in manifest.pieces.values() for piece in step if piece.kind == "eager"]
    modules = {op.name: op.module for op in manifest.custom_ops}
    return tuple(
        Splitting(
            name,
            sum(piece.name == name for piece in eager),
            modules.get(name, ""),
            next((how for op, how in manifest.backends.items() if _is_op(op, name)), ""),
            _first_call(name, traced.values()),
        )
        for name in dict.fromkeys(piece.name for piece in eager)
    )


def _is_op(target: str, name: str) -> bool:
    """Whether `fxc.attention.paged` is an overload of `fxc::attention`."""
    plain = name.replace("::", ".").removeprefix("aten.")
    return target == plain or target.startswith(f"{plain}.")


def _first_call(name: str, traced: Iterable[Graph]) -> Drawing | None:
    """The first call of an op, with the tensors that it reads."""
    for graph in traced:
        layouts = {op.name: op.layout for op in (*graph.inputs, *graph.ops)}
        for op in graph.ops:
            if _is_op(op.call, name):
                inputs = tuple(Op(read, "", "", layouts[read], ()) for read in op.reads)
                return draw(Graph(inputs, (op,), ()))
    return None
