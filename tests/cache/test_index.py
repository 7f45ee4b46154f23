from __future__ import annotations

from pathlib import Path

import pytest

from fxc.cache import Cache, key
from fxc.cache.index import LIMIT
from fxc.manifest import Source

from .conftest import make_manifest

DIRECT = key.digest("direct")


def source(digest: str, file: str = "model.py") -> Source:
    return Source(file=file, digest=digest)


def add(cache: Cache, name: str, *sources: Source) -> str:
    hash = key.digest(name)
    cache.publish(make_manifest(hash), "rank_0_0", {}, [])
    cache.remember(DIRECT, hash, sources)
    return hash


def test_the_first_whose_sources_all_match(cache: Cache) -> None:
    old = add(cache, "old", source("1"))
    new = add(cache, "new", source("2"), source("x", "ops.py"))
    now = {"model.py": "1", "ops.py": "x"}
    assert cache.lookup(DIRECT, lambda s: now[s.file]) == old
    now["model.py"] = "2"
    assert cache.lookup(DIRECT, lambda s: now[s.file]) == new
    now["ops.py"] = "y"
    assert cache.lookup(DIRECT, lambda s: now[s.file]) is None
    assert cache.lookup(key.digest("other"), lambda s: now[s.file]) is None


def test_a_source_that_is_gone(cache: Cache) -> None:
    add(cache, "a", source("1"))
    assert cache.lookup(DIRECT, lambda s: None) is None


def test_in_front_of_others(cache: Cache) -> None:
    """Where several match, as if any tuning will do."""
    first, second = add(cache, "first", source("1", "tuning:")), add(cache, "second", source("2", "tuning:"))
    assert cache.lookup(DIRECT, lambda s: s.digest) == second
    cache.prefer(DIRECT, first, [source("1", "tuning:")])
    assert cache.lookup(DIRECT, lambda s: s.digest) == first
    path = cache.root / f"index/{DIRECT}.json"
    before = path.stat().st_ino
    cache.prefer(DIRECT, first, [source("1", "tuning:")])
    cache.prefer(DIRECT, key.digest("unknown"), [source("3", "tuning:")])
    assert path.stat().st_ino == before, "nothing is written"


def test_an_artifact_that_is_gone(cache: Cache) -> None:
    hash = add(cache, "a", source("1"))
    (cache.root / "artifacts" / hash / "manifest.json").unlink()
    assert cache.lookup(DIRECT, lambda s: "1") is None


def test_the_newest_answer_for_the_same_sources(cache: Cache) -> None:
    add(cache, "old", source("1"))
    new = add(cache, "new", source("1"))
    assert cache.lookup(DIRECT, lambda s: "1") == new


def test_only_the_newest_are_kept(cache: Cache) -> None:
    hashes = [add(cache, str(number), source(str(number))) for number in range(LIMIT + 1)]
    assert cache.lookup(DIRECT, lambda s: "0") is None
    assert [cache.lookup(DIRECT, lambda s, n=n: str(n)) for n in range(1, LIMIT + 1)] == hashes[1:]  # type: ignore[misc]


@pytest.mark.parametrize("data", [b"", b"{", b'{"entries": []}', b"\xff"])
def test_a_damaged_file_is_a_miss_and_is_written_anew(cache: Cache, data: bytes) -> None:
    add(cache, "a", source("1"))
    path: Path = cache.root / "index" / f"{DIRECT}.json"
    path.write_bytes(data)
    assert cache.lookup(DIRECT, lambda s: "1") is None
    hash = add(cache, "b", source("1"))
    assert cache.lookup(DIRECT, lambda s: "1") == hash
