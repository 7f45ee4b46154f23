"""Fusions timed against the graph without them: who is compared with whom, what is kept, and what is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fxc import choose, lower, pipeline
from fxc.cache import Cache
from fxc.choose import Race, forms
from fxc.lower import Unit
from fxc.manifest import Binary, PassReport, PassSite, Piece, Timed
from fxc.shapes import Range
from tests.building import target
from tests.test_lower import PIECE
from tests.test_rewrite import MODEL

PLAIN = lower.unit(PIECE, Range((("n", 1, 64),)), 3, target(), "piece_0")


def fused(*names: str) -> Unit:
    return dataclasses.replace(PLAIN, text=f"# {' '.join(names)}\n", passes=" ".join(names)) if names else PLAIN


def timed(*names: str) -> Unit:
    return forms(fused(*names), names, lambda out: fused(*(name for name in names if name not in out)))


def times(fused_us: float, apart_us: float = 1.0) -> list[dict[str, Any]]:
    return [{"shape": "n=1", "fused_us": fused_us, "apart_us": apart_us}]


def test_a_unit_with_a_choice_is_none_of_its_forms() -> None:
    unit = timed("a", "b")
    made = [unit.form(frozenset(left)) for left in ((), "a", "b", "ab")]
    assert [form.passes for form in made] == ["a b", "b", "a", ""]
    assert len({unit.key, timed("a").key, *(form.key for form in made)}) == 6
    assert unit.form(frozenset()).forms == ()
    assert timed("a", "b").key == unit.key


@pytest.mark.parametrize(
    ("a", "b", "compared", "best"),
    [
        (0.5, 0.5, [("a b", "b"), ("a b", "a")], "a b"),
        (2.0, 0.5, [("a b", "b"), ("b", "")], "b"),
        (0.5, 2.0, [("a b", "b"), ("a b", "a")], "a"),
        (2.0, 2.0, [("a b", "b"), ("b", "")], ""),
        (1.0, 1.0, [("a b", "b"), ("b", "")], ""),
    ],
)
def test_one_fusion_after_the_other_stays_or_is_left_out(
    a: float, b: float, compared: list[tuple[str, str]], best: str
) -> None:
    race = Race(timed("a", "b"))
    seen = []
    for value in (a, b):
        seen.append((race.best.passes, race.other.passes))
        assert [form.passes for form in race.forms()] == [*seen[-1]]
        race.decide(times(value))
    assert (seen, race.best.passes, race.fusion) == (compared, best, None)
    assert [(line.fusion, line.kept) for line in race.timed] == [("a", a < 1), ("b", b < 1)]


def test_points_of_a_range_count_alike() -> None:
    race = Race(timed("a"))
    race.decide([*times(1.0, 4.0), *times(3.0, 1.0)])
    assert race.best.passes == "a"


def test_what_is_told(tmp_path: Path) -> None:
    line = Timed(fusion="a", shape="n=1", fused_us=1.0, apart_us=2.0, kept=True)
    binary = Binary(piece="p", range="n=1..8", bytes=1, sha256="", seconds=1.0, timed=(line,))
    sites = (PassSite(piece="piece_0", shape="n=1..8", matches=("x",)), PassSite(piece="piece_0", shape="n=4"))
    passes = (PassReport(name="a", matches=1, sites=sites), PassReport(name="b", matches=0, sites=sites))
    pieces = {"step_0": (Piece(name="piece_0", kind="compiled", unique="p"), Piece(name="o", kind="eager", unique="o"))}
    a, b = choose.report(passes, pieces, [binary])
    assert [site.timed for site in a.sites] == [(line,), ()]
    assert not any(site.timed for site in b.sites)


def test_built_and_timed(tmp_path: Path) -> None:
    """Both forms are compiled and proved; which one is faster is not for a test to say."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "model.yaml").write_text(
        "model: {target: ./model.py:Gated}\ndevice: cpu\ninputs: {x: {shape: [n, 64], dtype: float32}}\n"
        "dims: {n: {min: 1, max: 64}}\ncompile: {level: 3}\n"
    )
    result = pipeline.build(tmp_path / "model.yaml", cache_dir=tmp_path / "cache", jobs=2)
    (site,) = {entry.name: entry for entry in result.passes}["gated_quant"].sites
    assert site.matches == ("to",)
    assert [line.shape for line in site.timed] == ["n=1", "n=2", "n=64", "n=61"]
    assert all(line.fused_us > 0 and line.apart_us > 0 for line in site.timed)
    assert len({line.kept for line in site.timed}) == 1
    assert result.binaries["compiled"] == 2
    manifest = Cache.open(tmp_path / "cache").artifact(result.hash).manifest
    assert [binary.timed for binary in manifest.binaries.values()] == [site.timed]
    again = pipeline.build(tmp_path / "model.yaml", cache_dir=tmp_path / "cache", jobs=2)
    assert (again.hit, again.passes) == (True, result.passes)
