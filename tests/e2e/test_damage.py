"""Files of an artifact that are truncated, flipped, empty or missing: who notices, what it says, and what mends it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import fxc
from fxc.cache import Cache
from fxc.cli.main import run
from fxc.errors import CacheMissError, DamagedError
from tests.e2e.conftest import Built

Copied = Callable[[Built], Built]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit in the middle, in place: a hard link has it too."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def empty(path: Path) -> None:
    os.truncate(path, 0)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "empty": empty,
    "missing": Path.unlink,
}
KINDS = {
    "manifest": "manifest.json",
    "code": "rank_0_0/transformed_code.py",
    "graph": "rank_0_0/computation_graph.py",
    "pieces": "rank_0_0/pieces.py",
    "constants": "rank_0_0/constants.safetensors",
    "binary": "rank_0_0/inductor/*.so",
    "calls": "rank_0_0/inductor/*.json",
}


@pytest.fixture(autouse=True)
def registered(mixed: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops of the model."""
    if not hasattr(torch.ops.mine, "double"):
        monkeypatch.syspath_prepend(mixed.project.folder)
        __import__("ops")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_noticed_and_named(
    copied: Copied, mixed: Built, kind: str, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    built = copied(mixed)
    path = next(iter(sorted(built.artifact.glob(KINDS[kind]))))
    DAMAGES[damage](path)
    cache = ("--cache-dir", str(built.project.cache))
    gone = (kind, damage) == ("manifest", "missing")  # then it is no artifact
    code, error = (3, CacheMissError) if gone else (5, DamagedError)

    def told(*arguments: str) -> str:
        capfd.readouterr()
        assert run(arguments) == code
        return capfd.readouterr().err

    name = built.hash if gone else str(path)
    assert name in told("verify", built.hash, *cache)
    assert name in told("warm", built.hash, "--no-run", *cache)
    if kind not in ("graph", "pieces"):  # which no program needs
        with pytest.raises(error, match=name.replace(".", r"\.")):
            fxc.load(built.hash, cache_dir=built.project.cache)
        with pytest.raises(error, match=str(built.artifact)):
            fxc.load(built.artifact)
    if not gone:
        assert str(path) in told("verify", *cache)


def test_build_mends_texts_and_links(copied: Copied, mixed: Built) -> None:
    """What the store of binaries still has is not compiled again."""
    built = copied(mixed)
    artifact, project = built.artifact, built.project
    build = partial(fxc.build, project.yaml, cache_dir=project.cache)
    flip(artifact / KINDS["code"])
    empty(artifact / KINDS["graph"])
    (artifact / KINDS["constants"]).unlink()
    for path in artifact.glob("*/inductor/*"):
        path.unlink()
    result = build()
    assert (result.hash, result.binaries) == (built.hash, {"compiled": 0, "reused": 3})
    assert run(["verify", built.hash, "--cache-dir", str(project.cache)]) == 0
    truncate(artifact / "manifest.json")
    for path in (project.root / "index").iterdir():
        truncate(path)
    assert build().binaries == {"compiled": 0, "reused": 3}
    again = build()
    assert (again.hit, again.seconds["trace"]) == (True, 0)


def test_build_mends_binaries(copied: Copied, mixed: Built) -> None:
    """A flipped bit is in the artifact and in the store: they share the file."""
    built = copied(mixed)
    shutil.copytree(mixed.project.root / "scratch", built.project.root / "scratch", copy_function=os.link)
    (calls,) = built.artifact.glob(KINDS["calls"])
    flip(calls.with_suffix(".so"))
    result = fxc.build(built.project.yaml, cache_dir=built.project.cache)
    assert (result.hash, result.binaries) == (built.hash, {"compiled": 1, "reused": 2})
    assert run(["verify", "--cache-dir", str(built.project.cache)]) == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_or_binary_is_a_miss(copied: Copied, mixed: Built, damage: str) -> None:
    """In the store: what is damaged there is compiled again, whichever of its files it is."""
    built = copied(mixed)
    for name in ("record.json", "*.so", "*.json"):
        cache = Cache.open(built.project.cache)
        key = next(path.parent.name for path in sorted(cache.root.glob("binaries/*/*.so")))
        assert cache.binary(key) is not None
        DAMAGES[damage](next(iter(cache.root.glob(f"binaries/{key}/{name}"))))
        assert cache.binary(key) is None
        assert not (cache.root / "binaries" / key).exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_a_miss(copied: Copied, mixed: Built, damage: str) -> None:
    project = copied(mixed).project
    assert fxc.load(project.yaml, cache_dir=project.cache).manifest.hash == mixed.hash
    for path in project.root.glob("index/*"):
        DAMAGES[damage](path)
    with pytest.raises(CacheMissError, match="is not built, or was changed since"):
        fxc.load(project.yaml, cache_dir=project.cache)
    assert run(["warm", str(project.yaml), "--require-hit", "--cache-dir", str(project.cache)]) == 3
