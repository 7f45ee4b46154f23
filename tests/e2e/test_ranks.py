"""Ranks of one job: one artifact with a directory for each, equal files stored once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import fxc
from fxc.cli.main import run
from fxc.errors import CacheMissError, UsageError
from tests.e2e.conftest import Built
from tests.e2e.test_damage import flip

Copied = Callable[[Built], Built]


@pytest.fixture
def two(copied: Copied, plain: Built, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Both ranks, one named by arguments and one by the environment, beside the one of a single process."""
    built = copied(plain)
    project = built.project
    build = partial(fxc.build, project.yaml, cache_dir=project.cache)
    one = build(rank=1, world_size=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    zero = build()
    for result in (one, zero):
        assert (result.hash, result.binaries) == (plain.hash, {"compiled": 0, "reused": 1})
    monkeypatch.undo()
    assert build(rank=1, world_size=2).hit
    return built


def test_two_ranks(two: Built, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    artifact, cache = two.artifact, two.project.cache
    assert sorted(path.name for path in artifact.iterdir()) == ["manifest.json", "rank_0_0", "rank_1_0"]
    (zero,), (one,) = (list(artifact.glob(f"rank_{r}_0/inductor/*.so")) for r in (0, 1))
    assert zero.stat().st_ino == one.stat().st_ino
    assert (zero.name, zero.stat().st_nlink) == (one.name, 3)  # and the store of binaries

    assert fxc.load(two.hash, cache_dir=cache, rank=1, world_size=2).manifest.hash == two.hash
    with pytest.raises(CacheMissError, match=r"has no rank_2_0; its ranks are: rank_0_0, rank_1_0"):
        fxc.load(two.hash, cache_dir=cache, rank=2)
    with pytest.raises(CacheMissError, match=r"has no rank_0_1"):
        fxc.load(two.hash, cache_dir=cache, dp_rank=1)
    with pytest.raises(CacheMissError, match=r"rank_1_0 .* was built for a world of 2, not of 4"):
        fxc.load(two.hash, cache_dir=cache, rank=1, world_size=4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fxc.load(two.project.yaml, cache_dir=cache).manifest.hash == two.hash
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UsageError, match="rank 2 is outside a world of 2"):
        fxc.load(two.project.yaml, cache_dir=cache)
    assert run(["build", str(two.project.yaml), "--cache-dir", str(cache)]) == 2
    monkeypatch.setenv("RANK", "one")
    assert run(["build", str(two.project.yaml), "--cache-dir", str(cache)]) == 2
    assert "the environment variable RANK is 'one'" in capfd.readouterr().err

    flip(artifact / "rank_1_0" / "transformed_code.py")
    assert run(["verify", two.hash, "--cache-dir", str(cache)]) == 5
    assert str(artifact / "rank_1_0" / "transformed_code.py") in capfd.readouterr().err
