"""An artifact small enough to write by hand: y = x @ weight, at level 0, for x: float32[n, 4], n in 1..64, size 8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fxc import identity, machine
from fxc.cache import Artifact, Cache
from fxc.cli.main import run
from fxc.manifest import Factor, Input, Manifest, NearMiss, PassReport, PassSite, Piece, Program, Proof, Weight
from fxc.shapes import Range
from fxc.spec import parse_spec

HASH = "abcd" + "0" * 28
CODE = """import torch

WEIGHTS = ("weight",)


def piece_0(inputs):
    x, weight = inputs
    return [x @ weight]


def step_0(pieces, weights):
    (piece_0,) = pieces
    (weight,) = weights

    def step(x):
        (y,) = piece_0([x, weight])
        return y

    return step


PIECES = {"step_0": (piece_0,)}
"""
SPEC = {
    "model": {"target": "./linear.py:Linear"},
    "device": "cpu",
    "inputs": {"x": {"shape": ["n", 4], "dtype": "float32"}},
    "dims": {"n": {"min": 1, "max": 64}},
    "compile": {"sizes": [8], "level": 0},
}


def manifest(hash: str = HASH) -> Manifest:
    site = PassSite(piece="piece_0", shape="n=8", near_misses=(NearMiss(node="add", reason="is f64"),))
    return Manifest(
        hash=hash,
        fxc="0.1.0",
        created="2026-01-02T03:04:05Z",
        model="Linear",
        spec=parse_spec(SPEC),
        target=machine.probe("cpu"),
        factors=(Factor(name="graph", value="f" * 200), Factor(name="torch", value="2.13.0+cpu")),
        inputs=(Input(name="x", shape=("n", 4), dtype="float32"),),
        outputs="y",
        weights=(Weight(name="weight", shape=(4, 4), dtype="float32"),),
        constants=(),
        programs=(
            Program(range=Range((("n", 8, 8),)), step="step_0", binaries=()),
            Program(range=Range((("n", 1, 64),)), step="step_0", binaries=()),
        ),
        pieces={"step_0": (Piece(name="piece_0", kind="compiled", unique="a" * 32),)},
        binaries={},
        passes=(PassReport(name="silu_mul", matches=4, sites=(site,)),),
        proof=(Proof(piece="a" * 32, shape="n=1", max_rel_err=2.5e-7, tolerance=1e-5),),
        seconds={"trace": 3.14, "total": 4.0},
    )


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """The artifact, in the cache `tmp_path / "cache"`."""
    files: dict[str, bytes | Path] = {"transformed_code.py": CODE.encode(), "computation_graph.py": b"# the graph\n"}
    return Cache.open(tmp_path / "cache").publish(manifest(), "rank_0_0", files, ())


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Fxc = Callable[..., Result]


@pytest.fixture
def fxc(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fxc:
    """Runs a command line in this process, with the cache `tmp_path / "cache"`."""
    monkeypatch.setenv("FXC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        capfd.readouterr()
        code = run(arguments)
        return Result(code, *capfd.readouterr())

    return call


@pytest.fixture
def found(fxc: Fxc, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Which artifact model.yaml stands for, under "hash"; none at first."""
    found: dict[str, str] = {}
    monkeypatch.setattr(identity, "find", lambda *_, **__: found.get("hash"))
    Path("model.yaml").write_text(json.dumps(SPEC))
    return found
