"""Tuning records in the cache."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fxc.cache import Cache
from fxc.cache.choice import Rules
from fxc.errors import CacheIOError

NAME = "nvidia-h200-sm_90-torch-2.11.json"


def texts(cache: Cache) -> list[bytes]:
    return [data for _, data in cache.tuning(NAME)]


def test_a_record_is_replaced(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    assert cache.tuning(NAME) == []
    for count in range(3):
        cache.update_tuning(NAME, lambda data: (data or b"") + b"x")
        assert texts(cache) == [b"x" * (count + 1)]
    assert [path for path, _ in cache.tuning(NAME)] == [cache.layout.tuning / NAME]
    assert [path.name for path in cache.layout.tuning.iterdir()] == [NAME]
    assert (cache.layout.tuning / NAME).stat().st_mode & 0o777 == 0o600


def test_all_that_is_added_at_once_is_there(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    threads = [
        threading.Thread(target=cache.update_tuning, args=(NAME, lambda data: (data or b"") + b"x")) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts(cache) == [b"x" * 8]


def test_a_failed_change_changes_nothing(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    cache.update_tuning(NAME, lambda data: b"one")

    def fail(data: bytes | None) -> bytes:
        raise ValueError(data)

    with pytest.raises(ValueError, match="one"):
        cache.update_tuning(NAME, fail)
    assert texts(cache) == [b"one"]
    assert not list(cache.layout.staging.iterdir())


def test_a_read_only_place_is_read_and_not_written(tmp_path: Path) -> None:
    """Whose place each record is in, its own first: neither hides the other."""
    base = Cache.open(tmp_path / "base")
    base.update_tuning(NAME, lambda data: b"base")
    cache = Cache.open(tmp_path / "own", {"FXC_CACHE_PATH": str(tmp_path / "base")})
    there = (base.layout.tuning / NAME, b"base")
    assert cache.tuning(NAME) == [there]
    cache.update_tuning(NAME, lambda data: (data or b"") + b"own")
    assert cache.tuning(NAME) == [(cache.layout.tuning / NAME, b"own"), there]
    assert texts(base) == [b"base"]


def test_nothing_to_write(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    cache.update_tuning(NAME, lambda data: None)
    assert not cache.layout.tuning.exists()
    cache.update_tuning(NAME, lambda data: b"one")
    cache.update_tuning(NAME, lambda data: None)
    assert texts(cache) == [b"one"]


def test_prune_leaves_them(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    cache.update_tuning(NAME, lambda data: b"one")
    cache.prune(Rules(keep_latest=0))
    assert texts(cache) == [b"one"]


def test_where_nothing_can_be_read(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    (cache.layout.tuning / NAME).mkdir(parents=True)
    with pytest.raises(CacheIOError, match="cannot read"):
        cache.tuning(NAME)
