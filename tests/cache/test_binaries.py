from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fxc.cache import Cache
from fxc.errors import CacheIOError, CacheMissError, DamagedError, UsageError

from .conftest import LIBRARY, PIECE, make_binary

Store = Callable[..., str]
OTHER = LIBRARY[::-1]


def test_stored_and_found(cache: Cache, store: Store) -> None:
    assert cache.binary(PIECE) is None
    store()
    assert cache.binary(PIECE) == make_binary()
    assert cache.binary_files(PIECE) == [cache.root / "binaries" / PIECE / f"{PIECE}.so"]
    assert cache.binary_files(PIECE)[0].read_bytes() == LIBRARY


def test_two_files(cache: Cache, tmp_path: Path) -> None:
    files = {f"{PIECE}.so": tmp_path / "a", f"{PIECE}.json": tmp_path / "b"}
    (tmp_path / "a").write_bytes(LIBRARY)
    (tmp_path / "b").write_bytes(b"{}")
    cache.store_binary(PIECE, files, make_binary())
    assert [path.name for path in cache.binary_files(PIECE)] == [f"{PIECE}.json", f"{PIECE}.so"]
    (cache.root / "binaries" / PIECE / f"{PIECE}.json").write_bytes(b"[]")
    assert cache.binary(PIECE) is None


def test_a_good_one_stays(cache: Cache, store: Store) -> None:
    store()
    store(OTHER)
    assert cache.binary(PIECE) == make_binary()
    store(OTHER, force=True)
    assert cache.binary(PIECE) == make_binary(OTHER)
    assert cache.binary_files(PIECE)[0].read_bytes() == OTHER


@pytest.mark.parametrize("name", [f"{PIECE}.so", "record.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_one_is_removed(cache: Cache, store: Store, name: str, damage: str) -> None:
    store()
    hurt(cache.root / "binaries" / PIECE / name, damage)
    assert cache.binary(PIECE) is None
    assert not (cache.root / "binaries" / PIECE).exists()
    store(OTHER)
    assert cache.binary(PIECE) == make_binary(OTHER)


def test_a_damaged_one_is_replaced_without_being_asked_for(cache: Cache, store: Store) -> None:
    store()
    hurt(cache.binary_files(PIECE)[0], "flipped")
    store(OTHER)
    assert cache.binary(PIECE) == make_binary(OTHER)


def test_a_damaged_one_in_a_read_only_cache(cache: Cache, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store()
    hurt(cache.binary_files(PIECE)[0], "flipped")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, os.strerror(30))

    with monkeypatch.context() as patched:
        patched.setattr("fxc.cache.lock.os.open", refuse)
        assert cache.binary(PIECE) is None
    assert (cache.root / "binaries" / PIECE).exists()


def test_what_is_stored_must_be_what_the_record_says(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(OTHER)
    with pytest.raises(DamagedError, match=f"binary {PIECE}"):
        cache.store_binary(PIECE, {f"{PIECE}.so": tmp_path / "a"}, make_binary())
    with pytest.raises(UsageError, match=r"expected .*\.so and maybe .*\.json, got x"):
        cache.store_binary(PIECE, {"x": tmp_path / "a"}, make_binary())
    with pytest.raises(CacheIOError, match="No such file"):
        cache.store_binary(PIECE, {f"{PIECE}.so": tmp_path / "absent"}, make_binary())
    with pytest.raises(CacheMissError, match=f"no binary {PIECE}"):
        cache.binary_files(PIECE)
    assert list((cache.root / "staging").iterdir()) == []


def hurt(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"")
