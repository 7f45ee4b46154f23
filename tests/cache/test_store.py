from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fxc.cache import Cache
from fxc.errors import CacheMissError, UsageError

from .conftest import CODE, HASH, LIBRARY, make_manifest

FIRST, SECOND, THIRD = "3f2a" + "0" * 28, "3f2a" + "1" * 28, "77" * 16


@pytest.fixture
def filled(cache: Cache) -> Cache:
    for hash in (FIRST, SECOND, THIRD):
        cache.publish(make_manifest(hash), "rank_0_0", {"transformed_code.py": CODE}, [])
    return cache


def test_resolve(filled: Cache) -> None:
    assert filled.resolve("7777") == THIRD
    assert filled.resolve("3f2a1") == SECOND
    assert filled.resolve("3F2A0") == FIRST
    assert filled.resolve(THIRD) == THIRD


def test_resolve_ambiguous(filled: Cache) -> None:
    with pytest.raises(CacheMissError) as caught:
        filled.resolve("3f2a")
    assert caught.value.message == f"3f2a is ambiguous: it begins {FIRST}, {SECOND}"
    assert caught.value.hint == "give more digits"


@pytest.mark.parametrize("prefix", ["abcd", THIRD + "7"])
def test_resolve_unknown(filled: Cache, prefix: str) -> None:
    with pytest.raises(CacheMissError, match=f"no artifact {prefix} in {filled.root}"):
        filled.resolve(prefix)


@pytest.mark.parametrize("prefix", ["777", "7", "", "model.yaml", "777g", "../x", "7777\n"])
def test_resolve_nonsense(filled: Cache, prefix: str) -> None:
    with pytest.raises(UsageError):
        filled.resolve(prefix)


def test_resolve_sees_only_artifacts(filled: Cache) -> None:
    (filled.root / "artifacts" / FIRST / "manifest.json").unlink()
    assert filled.resolve("3f2a") == SECOND
    with pytest.raises(CacheMissError):
        filled.resolve(FIRST)


def test_list(filled: Cache, store: Callable[..., str]) -> None:
    filled.publish(make_manifest(), "rank_0_0", {"transformed_code.py": CODE}, [store()])
    (filled.root / "artifacts" / SECOND / "manifest.json").write_bytes(b"{}")
    (filled.root / "artifacts" / "not an artifact").mkdir()
    found = {summary.hash: summary for summary in filled.list()}
    assert sorted(found) == sorted([FIRST, SECOND, THIRD, HASH])
    assert found[SECOND].manifest is None
    assert found[FIRST].manifest == filled.artifact(FIRST).manifest
    manifest_bytes = (filled.root / "artifacts" / HASH / "manifest.json").stat().st_size
    assert found[HASH].bytes == len(CODE) + len(LIBRARY) + manifest_bytes
    assert found[HASH].created == 1767323045.0  # 2026-01-02T03:04:05Z


def test_equal_binaries_of_two_ranks_count_once(filled: Cache, store: Callable[..., str]) -> None:
    for rank in (0, 1):
        filled.publish(make_manifest(), f"rank_{rank}_0", {}, [store()], world_size=2)
    size = next(summary.bytes for summary in filled.list() if summary.hash == HASH)
    assert len(LIBRARY) < size < 2 * len(LIBRARY)


def test_touch(filled: Cache) -> None:
    path = filled.root / "artifacts" / FIRST / "manifest.json"
    os.utime(path, (1000, 1000))
    assert next(s.last_used for s in filled.list() if s.hash == FIRST) == 1000
    filled.touch(FIRST)
    assert next(s.last_used for s in filled.list() if s.hash == FIRST) > 1e9
    assert filled.artifact(FIRST).verify() == 1


def test_touch_is_silent(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(30, os.strerror(30))

    filled.touch("0" * 32)
    monkeypatch.setattr(os, "utime", refuse)
    filled.touch(FIRST)


def test_reading_writes_nothing(filled: Cache, store: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of reading works where nothing at all can be opened for writing, made, renamed or locked."""
    key = store()
    filled.remember("ab", FIRST, [])

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, os.strerror(30))

    for name in ("open", "mkdir", "rename", "replace", "unlink", "link", "fsync", "utime"):
        monkeypatch.setattr(os, name, refuse)
    hash = filled.resolve("7777")
    assert filled.artifact(hash).verify() == 1
    assert filled.artifact(hash).read("rank_0_0/transformed_code.py") == CODE
    assert filled.binary(key) is not None
    assert filled.lookup("ab", lambda source: None) == FIRST
    assert len(filled.list()) == 3
