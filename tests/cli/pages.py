"""An artifact written by hand for pages: two layers of y = relu(x @ weight), cut at an op, with everything that a page shows.

Its names hold markup, which must come out as text.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec

from fxc.cache import Artifact, Cache
from fxc.manifest import (
    Binary,
    CustomOp,
    Factor,
    Manifest,
    NearMiss,
    PassReport,
    PassSite,
    Piece,
    Program,
    Proof,
    Source,
    Unproved,
    Weight,
)  # fmt: skip
from fxc.shapes import Range
from tests.cli.conftest import manifest

EVIL = "</script><script>alert(1)</script>&\"'<b>"

CODE = """import torch

WEIGHTS = (
    'layers.0.weight',
    'layers.1.weight',
)

def step_0(pieces, weights, empty=torch.empty):
    piece_0, piece_1, piece_2 = pieces
    (
        layers_0_weight,
        layers_1_weight,
    ) = weights
    zoo_mix = torch.ops.zoo.mix.default

    def step(x):
        relu, = piece_0([x, layers_0_weight])  # f32[n, 4]
        mix = zoo_mix(relu)  # f32[n, 4]
        del relu
        relu_1, = piece_1([mix, layers_1_weight])  # f32[n, 4]
        out = empty((8,), dtype=torch.float32, device=torch.device('cpu'))  # f32[8]
        piece_2([relu_1, out])
        return out

    return step
"""
GRAPH = """import torch


def step_0(x: "f32[n, 4]", w: "f32[4, 4]"):
    relu = torch.ops.aten.relu.default(x)  # f32[n, 4]
    # model.py:3 in forward: return mix(x)
    mix = torch.ops.zoo.mix.default(relu, 2)  # f32[n, 4]
    return (mix,)
"""
PIECES = """import math
import operator

import torch

inf, nan = math.inf, math.nan


def piece_0(in_0: "f32[n, 4]", in_1: "f32[4, 4]"):
    sym_size = torch.ops.aten.sym_size.int(in_0, 0)
    linear = torch.ops.aten.linear.default(in_0, in_1)  # f32[n, 4]
    mul = sym_size * 4
    view = torch.ops.aten.view.default(linear, [mul])  # f32[4*n]
    relu = torch.ops.aten.relu.default(view, '</script>')  # f32[n, 4] strides [1, n]
    return (relu,)


def piece_1(in_0: "f32[n, 4]", in_1: "f32[8]"):
    copy_ = torch.ops.aten.copy_.default(in_1, in_0)  # f32[8]
    return ()
"""


def shown() -> Manifest:
    """A manifest with some of everything."""
    ones, twos = "a" * 32, "b" * 32
    range_, size = Range((("n", 1, 64),)), Range((("n", 8, 8),))
    near = NearMiss(node="relu", reason=f"its input is {EVIL}")
    keys = {f"{piece}{box}": Binary(piece=unique, range=label, bytes=300_000, sha256="0", seconds=seconds)
            for piece, unique in (("a", ones), ("b", twos)) for box, label, seconds in (("1", "n=8", 9.5), ("2", "n=1..64", 12.0))}  # fmt: skip
    return msgspec.structs.replace(
        manifest(),
        model=EVIL,
        outputs=f"({EVIL},)",
        weights=tuple(Weight(name=f"layers.{i}.weight", shape=(4, 4), dtype="float32") for i in range(2)),
        pieces={
            "step_0": (
                Piece(name="piece_0", kind="compiled", unique=ones, ops=5, dims=("n",)),
                Piece(name="zoo::mix", kind="eager", unique="zoo::mix"),
                Piece(name="piece_0", kind="compiled", unique=ones, ops=5, dims=("n",)),
                Piece(name="piece_1", kind="compiled", unique=twos, ops=1, dims=("n",)),
            )
        },
        programs=(
            Program(range=size, step="step_0", binaries=("a1", "a1", "b1")),
            Program(range=range_, step="step_0", binaries=("a2", "a2", "b2")),
        ),
        binaries=keys,
        passes=(
            PassReport(
                name="norm_quant",
                matches=1,
                sites=(
                    PassSite(piece="piece_0", shape="n=8", matches=("linear",), near_misses=(near,)),
                    PassSite(piece="piece_0", shape="n=1..64", matches=("linear",), near_misses=(near,)),
                ),
            ),
            PassReport(name="noop", matches=0),
        ),
        custom_ops=(CustomOp(name="zoo::mix", module=EVIL),),
        sources=(Source(file=EVIL, digest="0"),),
        factors=(
            Factor(name="graph", value="f" * 200),
            Factor(name="ops", value=EVIL),
            Factor(name="triton", value=""),
        ),
        proof=(
            Proof(piece="step_0", shape="n=2", max_rel_err=0.0, tolerance=1e-4),
            Proof(piece=ones, shape="n=1", max_rel_err=2.5e-7, tolerance=1e-4),
            Proof(piece=ones, shape="n=64", max_rel_err=2.5e-6, tolerance=1e-4, excused=3),
        ),
        unproved=(Unproved(piece=twos, shape="n=1", reason=EVIL),),
        seconds={"trace": 3.0, "partition": 0.0, "compile": 6.0, "total": 10.0},
    )


def publish(cache: Path, manifest: Manifest, **files: str) -> Artifact:
    """Put it into a cache; `pieces="..."` is the text of pieces.py."""
    texts: dict[str, bytes | Path] = {f"{name}.py": text.encode() for name, text in files.items()}
    manifest = msgspec.structs.replace(manifest, binaries={}, programs=())
    return Cache.open(cache).publish(manifest, "rank_0_0", texts, ())


class Element:
    """An element of a page."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.text = ""
        """Of everything inside it."""


VOID = {"meta"}
APART = {"td", "th", "p", "li", "dt", "dd", "a", "small", "span", "h1", "h2", "h3", "h4", "code"}
"""Elements that have a space behind them in an element's text."""


class Page(HTMLParser):
    """A page that was read; an end without its beginning, or the other way round, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag
        if tag in APART:
            self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str, **attributes: Any) -> list[Element]:
        """Elements with these attributes; `class_` is one of the classes."""
        found = [element for element in self.elements if element.tag == tag]
        if name := attributes.pop("class_", None):
            found = [element for element in found if name in element.attributes.get("class", "").split()]
        return [element for element in found if attributes.items() <= element.attributes.items()]
