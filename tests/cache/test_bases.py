"""A writable cache over read-only places."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fxc.cache import Cache
from fxc.errors import CacheMissError, DamagedError, UsageError
from fxc.manifest import Source

from .conftest import CODE, HASH, LIBRARY, PIECE, make_binary, make_manifest
from .test_binaries import hurt

OTHER = "77" * 16
SOURCES = (Source(file="model.py", digest="1"),)


def snapshot(directory: Path) -> dict[str, tuple[int, ...]]:
    """All that a write changes: times, links, sizes, names."""
    found: dict[str, tuple[int, ...]] = {}
    for path in [directory, *directory.rglob("*")]:
        status = path.stat()
        found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink, status.st_size)
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A cache with an artifact of two ranks, a binary, and a direct key."""
    cache = Cache.open(tmp_path / "base")
    (tmp_path / "compiled.so").write_bytes(LIBRARY)
    cache.store_binary(PIECE, {f"{PIECE}.so": tmp_path / "compiled.so"}, make_binary())
    for rank in ("rank_0_0", "rank_1_0"):
        cache.publish(make_manifest(), rank, {"transformed_code.py": CODE}, [PIECE], world_size=2)
    cache.remember("ab", HASH, SOURCES)
    return tmp_path / "base"


@pytest.fixture
def over(base: Path, tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "own", {"FXC_CACHE_PATH": f"{tmp_path / 'absent'}:{base}"})


def digest(source: Source) -> str:
    return "1"


def test_what_a_base_has_is_found(over: Cache, base: Path) -> None:
    before = snapshot(base)
    assert over.resolve(HASH[:6]) == HASH
    assert over.artifact(HASH).path == base / "v1/artifacts" / HASH
    assert over.artifact(HASH).verify() == 4
    assert over.lookup("ab", digest) == HASH
    assert over.binary(PIECE) == make_binary()
    assert over.binary_files(PIECE) == [base / f"v1/binaries/{PIECE}/{PIECE}.so"]
    (summary,) = over.list()
    assert (summary.path, summary.read_only) == (str(base / "v1/artifacts" / HASH), True)
    over.touch(HASH)
    assert not over.root.exists()
    assert snapshot(base) == before


def test_the_writable_place_comes_first(over: Cache, base: Path) -> None:
    over.publish(make_manifest(), "rank_0_0", {"transformed_code.py": b"own"}, [])
    assert over.artifact(HASH).path == over.root / "artifacts" / HASH
    assert over.artifact(HASH).read("rank_0_0/transformed_code.py") == b"own"
    assert [(summary.hash, summary.read_only) for summary in over.list()] == [(HASH, False)]


def test_building_on_a_base_copies_what_it_needs(over: Cache, base: Path) -> None:
    before = snapshot(base)
    artifact = over.publish(make_manifest(), "rank_2_0", {"transformed_code.py": b"2"}, [PIECE], world_size=3)
    assert sorted(artifact.manifest.ranks) == ["rank_0_0", "rank_1_0", "rank_2_0"]
    assert artifact.verify() == 6
    own = over.root / f"binaries/{PIECE}/{PIECE}.so"
    assert os.path.samefile(artifact.path / f"rank_2_0/inductor/{PIECE}.so", own)
    assert over.binary_files(PIECE) == [own]
    assert snapshot(base) == before


def test_an_index_entry_in_one_place_and_its_artifact_in_another(over: Cache) -> None:
    over.remember("cd", HASH, SOURCES)
    assert over.lookup("cd", digest) == HASH


def test_the_last_use_is_kept_in_the_writable_place(over: Cache, base: Path) -> None:
    os.utime(base / f"v1/artifacts/{HASH}/manifest.json", (1000, 1000))
    over.publish(make_manifest(OTHER), "rank_0_0", {}, [])
    before = snapshot(base)
    assert next(s.last_used for s in over.list() if s.hash == HASH) == 1000
    over.touch(HASH)
    assert next(s.last_used for s in over.list() if s.hash == HASH) > 1e9
    assert (over.root / "used" / HASH).stat().st_size == 0
    assert snapshot(base) == before


def test_damage_in_the_writable_place_is_covered_by_a_base(over: Cache, base: Path) -> None:
    artifact = over.publish(make_manifest(), "rank_0_0", {"transformed_code.py": CODE}, [PIECE])
    hurt(artifact.path / "manifest.json", "flipped")
    assert over.artifact(HASH).path == base / "v1/artifacts" / HASH
    hurt(over.root / f"binaries/{PIECE}/{PIECE}.so", "flipped")
    assert over.binary(PIECE) == make_binary()
    assert over.binary_files(PIECE) == [base / f"v1/binaries/{PIECE}/{PIECE}.so"]
    assert not (over.root / "binaries" / PIECE).exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_damage_in_a_base_is_not_removed_and_not_used(over: Cache, base: Path, damage: str) -> None:
    hurt(base / f"v1/binaries/{PIECE}/{PIECE}.so", damage)
    hurt(base / f"v1/artifacts/{HASH}/manifest.json", "flipped")
    before = snapshot(base)
    assert over.binary(PIECE) is None
    with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
        over.artifact(HASH)
    artifact = over.publish(make_manifest(), "rank_0_0", {"transformed_code.py": CODE}, [])
    assert over.artifact(HASH) == artifact
    assert snapshot(base) == before


def test_nowhere(over: Cache, base: Path) -> None:
    with pytest.raises(CacheMissError, match=f"no artifact abcd in {over.root}, .*absent/v1, {base}/v1"):
        over.resolve("abcd")
    with pytest.raises(CacheMissError, match="is not an artifact"):
        over.artifact("ab" * 16)


def test_what_may_be_written(tmp_path: Path) -> None:
    def bases(text: str) -> list[str]:
        return [str(layout.root) for layout in Cache.open(tmp_path, {"FXC_CACHE_PATH": text}).bases]

    assert bases("") == bases("::") == bases(str(tmp_path)) == []
    assert bases("/a:/b/:/a") == ["/a/v1", "/b/v1"]
    with pytest.raises(UsageError, match="FXC_CACHE_PATH names 'image/fxc', which is not absolute"):
        bases("/a:image/fxc")


def test_a_base_that_is_no_cache(over: Cache, base: Path) -> None:
    (base / "v1/artifacts").rename(base / "v1/gone")
    (base / "v1/artifacts").write_text("a file")
    with pytest.raises(CacheMissError):
        over.artifact(HASH)
