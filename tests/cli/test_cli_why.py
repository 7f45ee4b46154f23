"""`fxc why`: on a model that is traced and built at level 0, where nothing is compiled."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fxc as library
from fxc import machine, tuning
from fxc.cache import Cache
from fxc.cost import like
from fxc.manifest import Binary, Program, Source
from fxc.shapes import Range
from fxc.spec import CompileSpec
from fxc.why import _lines

MODEL = """import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x):
        return torch.relu(x @ self.weight)
"""
SPEC: dict[str, Any] = {
    "model": {"target": "./linear.py:Linear"},
    "device": "cpu",
    "inputs": {"x": {"shape": ["n", 4], "dtype": "float32"}},
    "dims": {"n": {"min": 1, "max": 64}},
    "compile": {"sizes": [8], "level": 0},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and, in `cache`, its artifact."""
    folder = tmp_path_factory.mktemp("why")
    (folder / "linear.py").write_text(MODEL)
    (folder / "model.yaml").write_text(json.dumps(SPEC))
    library.build(folder / "model.yaml", cache_dir=folder / "cache", prove=False)
    return folder


@pytest.fixture
def known(fxc: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its hash; a copy of the folder is the current one."""
    shutil.copytree(project, ".", dirs_exist_ok=True)
    monkeypatch.delitem(sys.modules, "linear", raising=False)
    (artifact,) = Path("cache/v1/artifacts").iterdir()
    return artifact.name


def names(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["name"] for entry in entries]


def test_hit(fxc: Any, known: str) -> None:
    told = fxc("why", "model.yaml", "--json")
    assert (told.code, told.err) == (0, "hit: it is in the cache\n")
    assert list(told.json) == [
        "hit",
        "reason",
        "hash",
        "nearest",
        "changed",
        "factors",
        "compile",
        "binaries",
        "seconds",
    ]
    assert (told.json["hit"], told.json["hash"], told.json["nearest"]) == (True, known, known)


def test_another_compiler(fxc: Any, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load takes what is there, a build compiles again."""
    monkeypatch.setattr(machine, "compiler_version", lambda: "g++ 99.1.0")
    told = fxc("why", "model.yaml", "--no-trace", "--json", "-q").json
    assert (told["hit"], [(entry["name"], entry["new"]) for entry in told["changed"]]) == (
        False, [("compiler", "g++ 99.1.0")],
    )  # fmt: skip


def test_a_tuning_record(fxc: Any, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "find", lambda choice, *_: (None, {"auto": "abcd", "none": ""}[choice]))
    told = fxc("why", "model.yaml", "--no-trace", "--json", "-q").json
    assert (told["hit"], told["changed"]) == (False, [{"name": "tuning", "old": "none", "new": "abcd", "lines": []}])
    assert fxc("why", "model.yaml", "--tuning", "none", "--json", "-q").json["hit"]


def test_a_gpu_that_is_not_here(fxc: Any, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is traced, and what is compared with is built for the CPU."""
    monkeypatch.setattr(machine, "torch_version", lambda: ("2.11.0", "13.0"))
    words = ("why", "model.yaml", "--target", "h200", "--set", "device=cuda", "--json", "-q")
    told = fxc(*words).json
    changed = {entry["name"]: (entry["old"], entry["new"]) for entry in told["changed"]}
    assert (told["hit"], told["hash"], told["nearest"]) == (False, None, known)
    assert changed["spec.device"] == ("cpu", "cuda")
    assert changed["target.compute_capability"] == ("null", "[9,0]")
    assert changed["target.properties.name"][1] == "NVIDIA H200"
    assert fxc(*words, "--march", "x86-64-v9").code == 2
    assert fxc("why", "model.yaml", "--target", "h200").err.splitlines()[-1] == "hint: --set device=cuda"
    assert fxc("why", "model.yaml", "--target", "k80").code == 2


def test_nothing_like_it(fxc: Any, known: str) -> None:
    told = fxc("why", "model.yaml", "--cache-dir", "empty", "--no-trace", "--json")
    assert told.err == "miss: there is no artifact of this model in the cache\n"
    assert (told.json["hit"], told.json["nearest"], told.json["seconds"]) == (False, None, None)
    assert not Path("empty").exists()


def test_a_key_of_model_yaml(fxc: Any, known: str) -> None:
    told = fxc("why", "model.yaml", "--no-trace", "--set", "dims.n.max=32", "-O1")
    assert (told.code, told.out) == (0, "")
    first, nearest, *rest, last = told.err.splitlines()
    assert first == f"miss: not as {known} was built: spec.dims.n.max, spec.compile.level"
    assert nearest == f"nearest: {known}"
    assert rest == ["  spec.dims.n.max: 64 -> 32", "  spec.compile.level: 0 -> 1"]
    assert last.startswith("a build takes about ")


def test_defaults_are_shown(fxc: Any, known: str) -> None:
    Path("model.yaml").write_text(json.dumps({**SPEC, "compile": {}}))
    told = fxc("why", "model.yaml", "--no-trace", "--json", "-q").json
    assert [(entry["name"], entry["old"], entry["new"]) for entry in told["changed"]] == [
        ("spec.compile.sizes", "[8]", "[]"),
        ("spec.compile.level", "0", "2"),
    ]


def test_a_source_file_and_the_lines_of_the_graph(fxc: Any, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("linear.py").write_text("# a comment\n" + MODEL.replace("torch.relu(", "torch.sigmoid("))
    monkeypatch.delitem(sys.modules, "linear", raising=False)
    quick = fxc("why", "model.yaml", "--no-trace", "--json").json
    assert (quick["hash"], names(quick["changed"]), quick["factors"]) == (None, ["source.linear.py"], [])
    told = fxc("why", "model.yaml", "--json")
    assert "  source.linear.py: changed\n" in told.err
    found = told.json
    assert (found["hit"], found["nearest"], names(found["factors"])) == (False, known, ["graph"])
    assert found["hash"] != known
    (graph,) = found["factors"]
    changed = [line.strip() for line in graph["lines"] if line[0] in "+-" and "#" not in line[:8]]
    assert any("torch.ops.aten.relu.default" in line and line.startswith("-") for line in changed)
    assert any("torch.ops.aten.sigmoid.default" in line and line.startswith("+") for line in changed)
    assert "    -    relu = torch.ops.aten.relu.default" in told.err
    assert fxc("build", "model.yaml", "--no-prove", "-q").out.strip() == found["hash"]
    told = fxc("why", known, found["hash"], "--json")
    assert told.err.startswith("miss: they differ in graph\n")
    assert (names(told.json["changed"]), names(told.json["factors"])) == (["source.linear.py"], ["graph"])
    assert told.json["factors"][0]["lines"] == graph["lines"]


def test_a_comment_costs_a_trace(fxc: Any, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("linear.py").write_text("# a comment\n" + MODEL)
    monkeypatch.delitem(sys.modules, "linear", raising=False)
    told = fxc("why", "model.yaml", "--json").json
    assert (told["hit"], told["hash"], names(told["changed"])) == (True, known, ["source.linear.py"])
    assert told["reason"] == "it is in the cache, but a build has to trace again to know that"


def test_what_would_be_compiled(fxc: Any, known: str, tmp_path: Path) -> None:
    """At level 1: the nearest artifact has no timings, then it gets some."""
    told = fxc("why", "model.yaml", "-O1", "--json")
    assert told.json["compile"] == [{"piece": "piece_0 n=1..64", "seconds": None}]
    assert (told.json["binaries"], told.json["seconds"]) == (1, None)
    assert "to compile: 1; the artifact has 1 binary\n  piece_0 n=1..64\n" in told.err
    cache = Cache.open(tmp_path / "cache")
    manifest = cache.artifact(known).manifest
    binary = Binary(piece="p", range="n=8", bytes=1, sha256="0", seconds=4.0)
    timed = msgspec.structs.replace(
        manifest, binaries={"ab": binary}, seconds={"compile": 8.0, "prove": 2.0, "total": 12.0}
    )
    cache.publish(timed, "rank_0_0", {"computation_graph.py": b""}, [])
    told = fxc("why", "model.yaml", "-O1", "--json")
    assert told.json["compile"] == [{"piece": "piece_0 n=1..64", "seconds": 4.0}]
    assert 10.0 < told.json["seconds"] < 40.0
    assert "piece_0 n=1..64  4.0 s\n" in told.err


@pytest.fixture
def timed(known: str, tmp_path: Path) -> str:
    """The same as if it had been compiled, with sizes 4 and 8."""
    cache = Cache.open(tmp_path / "cache")
    manifest = cache.artifact(known).manifest
    (first,) = (piece for step in manifest.pieces.values() for piece in step)
    shapes = {"n=4": 3.0, "n=8": 5.0, "n=1..64": 8.0}
    binaries = {
        f"{index}b": Binary(piece=first.unique, range=shape, bytes=1, sha256="0", seconds=seconds)
        for index, (shape, seconds) in enumerate(shapes.items())
    }
    ranges = [Range((("n", low, high),)) for low, high in ((4, 4), (8, 8), (1, 64))]
    spec = msgspec.structs.replace(manifest.spec, compile=CompileSpec(sizes=(4, 8), level=2))
    (rank,) = manifest.ranks.values()
    now = msgspec.structs.replace(
        manifest, spec=spec, binaries=binaries, programs=tuple(Program(range=r, step="step_0", binaries=()) for r in ranges),
        seconds={"trace": 2.0, "compile": 32.0, "prove": 0.0, "total": 40.0},
    )  # fmt: skip
    direct = tuple(
        msgspec.structs.replace(f, value=msgspec.json.encode(spec).decode()) if f.name == "spec" else f
        for f in rank.direct
    )
    cache.publish(now, "rank_0_0", {"computation_graph.py": b""}, [], direct=direct)
    Path("model.yaml").write_text(json.dumps({**SPEC, "compile": {"sizes": [4, 8], "level": 2}}))
    for entry in (tmp_path / "cache/v1/index").iterdir():
        entry.unlink()
    return known


@pytest.mark.parametrize(
    ("overrides", "pieces", "seconds"),
    [
        (["compile.sizes=[4,8,16]"], {"piece_0 n=16": 16 / 3}, 2 + 32 * (16 / 3) / 16),
        (["compile.sizes=[2,4,16]"], {"piece_0 n=2": 16 / 3, "piece_0 n=16": 16 / 3}, 2 + 32 * (32 / 3) / 16),
        (["compile.sizes=[8]"], {}, 40.0),
        (
            ["dims.n.max=32"],
            {"piece_0 n=4": 3.0, "piece_0 n=8": 5.0, "piece_0 n=1..32": 16 / 3},
            2 + 32 * (40 / 3) / 16,
        ),
        (["compile.level=0"], {}, 40.0),
    ],
)
def test_what_would_be_compiled_about(
    fxc: Any, timed: str, overrides: list[str], pieces: dict[str, float], seconds: float
) -> None:
    """Without a trace, from the nearest artifact; `warm --require-hit` says it too."""
    options = [word for override in overrides for word in ("--set", override)]
    told = fxc("why", "model.yaml", "--no-trace", "--json", *options).json
    assert {entry["piece"]: entry["seconds"] for entry in told["compile"]} == pytest.approx(pieces)
    assert told["seconds"] == pytest.approx(seconds)
    warm = fxc("warm", "model.yaml", "--require-hit", *options)
    assert warm.code == 3
    assert f"nearest: {timed}\n" in warm.err
    assert ("to compile: about " in warm.err) == bool(pieces)
    assert all(f"  {piece}  " in warm.err for piece in pieces)
    assert "a build takes about " in warm.err


def test_warm_names_the_file_and_where_its_lines_are_shown(fxc: Any, timed: str) -> None:
    Path("linear.py").write_text("# a comment\n" + MODEL)
    told = fxc("warm", "model.yaml", "--require-hit")
    assert told.code == 3
    assert "  source.linear.py: changed\n" in told.err
    assert "to compile: about 3; the artifact has 3 binaries\n" in told.err
    assert "`fxc why` with the same arguments traces the model" in told.err


def test_a_file_that_is_gone_and_a_variable(fxc: Any, known: str, tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    manifest = cache.artifact(known).manifest
    more = (Source(file="gone.py", digest="1"), Source(file="env:MODE", digest="1"))
    cache.publish(msgspec.structs.replace(manifest, sources=(*manifest.sources, *more)), "rank_0_0", {}, [])
    told = fxc("why", "model.yaml", known, "--no-trace")
    assert told.err.splitlines()[1:] == ["  source.gone.py: is gone", "  environment.MODE: changed"]


def test_warm_says_why(fxc: Any, known: str) -> None:
    told = fxc("warm", "model.yaml", "--require-hit", "--set", "dims.n.max=32")
    assert (told.code, told.out) == (3, "")
    lines = told.err.splitlines()
    assert lines[0] == f"miss: not as {known} was built: spec.dims.n.max"
    assert "  spec.dims.n.max: 64 -> 32" in lines
    assert lines[-2].startswith("fxc: error: model.yaml is not built, or was changed since")
    quiet = fxc("warm", "model.yaml", "--require-hit", "--set", "dims.n.max=32", "-q")
    assert len(quiet.err.splitlines()) == 2


def test_usage(fxc: Any, known: str) -> None:
    assert fxc("why", known).code == 2
    assert fxc("why", known, "model.yaml").code == 2
    assert fxc("why", known, "dddd").code == 3
    assert fxc("why", known, known).err == "hit: they are the same\n"
    assert fxc("why", "absent.yaml").code == 2


def test_lines_do_without_numbers_of_source_lines() -> None:
    old = "def f():\n    # m.py:3 in forward: relu(x)\n    a = relu(x)\n    return a\n"
    assert _lines(old, old.replace("m.py:3", "m.py:33")) == ()
    assert _lines(old, old.replace("relu", "gelu"))[1:] == (
        " def f():", "-    # m.py in forward: relu(x)", "-    a = relu(x)", "+    # m.py in forward: gelu(x)",
        "+    a = gelu(x)", "     return a",
    )  # fmt: skip


def test_times_of_like_binaries() -> None:
    def binary(label: str, seconds: float) -> Binary:
        return Binary(piece="p", range=label, bytes=1, sha256="0", seconds=seconds)

    known = [binary("n=1", 2.0), binary("n=1", 4.0), binary("n=8", 30.0)]
    assert like(known, "n=1") == 3.0
    assert like(known, "n=64") == 12.0
    assert like([], "n=1") is None
