"""What a prune leaves on the disk, alone and beside others."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from fxc.cache import Cache, Rules, key
from fxc.capture_plan import Recorded, beside, note
from fxc.errors import CacheMissError
from fxc.manifest import Source

from .conftest import CODE, HASH, LIBRARY, make_binary, make_manifest
from .test_bases import snapshot
from .test_lock import hold, kill

OLD, NEW, BAD = "0a" * 16, "0b" * 16, "0c" * 16
ALL = Rules(keep_latest=0)


def add(cache: Cache, hash: str, used: float, *, data: bytes = LIBRARY) -> str:
    """An artifact with a binary of its own, named like it."""
    binary = make_binary(data)
    source = cache.root.parent.with_name(f"{hash}.{os.getpid()}.so")
    source.write_bytes(data)
    cache.store_binary(hash, {f"{hash}.so": source}, binary)
    manifest = msgspec.structs.replace(make_manifest(hash), binaries={hash: binary})
    cache.publish(manifest, "rank_0_0", {"transformed_code.py": CODE}, [hash])
    with suppress(FileNotFoundError):  # pruned already
        os.utime(cache.root / "artifacts" / hash / "manifest.json", (used, used))
    return hash


@pytest.fixture
def filled(cache: Cache) -> Cache:
    add(cache, OLD, 1000.0)
    add(cache, NEW, 2000.0, data=LIBRARY[::-1])
    return cache


def hashes(cache: Cache) -> list[str]:
    return [summary.hash for summary in cache.list()]


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.is_dir() else []


def test_the_least_recently_used_goes_with_its_binary(filled: Cache) -> None:
    pruned = filled.prune(Rules(keep_latest=1))
    assert [(removal.hash, removal.reason, removal.last_used) for removal in pruned.removed] == [
        (OLD, "keep-latest", 1000.0)
    ]
    assert pruned.binaries == 1
    assert hashes(filled) == names(filled.root / "binaries") == [NEW]
    assert filled.artifact(NEW).verify() == 2
    assert names(filled.root / "staging") == []
    on_disk = {s.st_ino: s.st_size for s in map(os.stat, filter(Path.is_file, (filled.root / "artifacts").rglob("*")))}
    record = (filled.root / "binaries" / NEW / "record.json").stat().st_size
    assert pruned.bytes == sum(on_disk.values()) + record
    assert f"use.{NEW}.lock" in names(filled.root / "locks")
    assert f"use.{OLD}.lock" not in names(filled.root / "locks")


def test_the_note_of_what_graphs_took_goes_too(filled: Cache) -> None:
    for hash in (OLD, NEW):
        note(beside(filled.root / "artifacts" / hash), "GPU", "2.11", [Recorded({"n": 8}, "full", 100, 0.5)])
    filled.prune(Rules(keep_latest=1))
    assert names(filled.root / "captures") == [f"{NEW}.json"]


def test_a_binary_that_another_artifact_refers_to_stays(filled: Cache) -> None:
    manifest = filled.artifact(OLD).manifest
    filled.publish(msgspec.structs.replace(manifest, hash=HASH), "rank_0_0", {}, [OLD])
    pruned = filled.prune(Rules(keep_latest=2))
    assert [removal.hash for removal in pruned.removed] == [OLD]
    assert pruned.binaries == 0
    assert filled.binary(OLD) is not None


def test_dry_run_changes_nothing(filled: Cache) -> None:
    (filled.root / "staging" / "left").mkdir()
    filled.prune(ALL, dry_run=True)  # makes what locks it needs
    before = {path: status for path, status in snapshot(filled.root).items() if "locks" not in path}
    pruned = filled.prune(ALL, dry_run=True)
    assert before == {path: status for path, status in snapshot(filled.root).items() if "locks" not in path}
    assert ([removal.hash for removal in pruned.removed], pruned.binaries, pruned.staging, pruned.dry_run) == (
        [OLD, NEW],
        2,
        1,
        True,
    )
    assert msgspec.structs.replace(filled.prune(ALL), dry_run=True) == pruned
    assert hashes(filled) == []


def test_nothing_there(cache: Cache) -> None:
    assert cache.prune(ALL).removed == ()
    assert not cache.root.exists()


def test_what_nothing_refers_to(filled: Cache, store: Callable[..., str]) -> None:
    store()
    filled.remember("ab", OLD, [Source(file="m.py", digest="1")])
    filled.remember("cd", "9" * 32, [])
    half = filled.root / "artifacts" / BAD
    half.mkdir()
    os.utime(half, (0, 0))
    with filled.lock("some binary"):
        pass
    older = filled.root.with_name("v0")
    for name in ("artifacts", "locks"):
        (older / name).mkdir(parents=True)
    pruned = filled.prune(Rules())
    assert (pruned.removed, pruned.binaries) == ((), 1)
    assert hashes(filled) == names(filled.root / "artifacts") == names(filled.root / "binaries") == [OLD, NEW]
    assert names(filled.root / "index") == ["ab.json"]
    assert not older.exists()
    assert {name for name in names(filled.root / "locks") if not name.startswith("use.")} <= {
        "artifacts.lock", "binaries.lock", "building.lock", "index.lock", "pulling.lock", "staging.lock",
    }  # fmt: skip


def test_what_killed_processes_left(filled: Cache) -> None:
    dead, left = hold(filled, "staging")
    alive, kept = hold(filled, "staging")
    kill(dead)
    assert filled.prune(Rules()).staging == 1
    assert not Path(left).exists()
    assert Path(kept).exists()
    kill(alive)


def test_a_damaged_artifact_goes_as_incompatible_only(filled: Cache) -> None:
    (filled.root / "artifacts" / OLD / "manifest.json").write_bytes(b"{}")
    assert filled.prune(Rules()).removed == ()
    assert [removal.hash for removal in filled.prune(Rules(unfit=lambda manifest: False)).removed] == [OLD]


def test_read_only_places_are_left_alone(filled: Cache, tmp_path: Path) -> None:
    over = Cache.open(tmp_path / "own", {"FXC_CACHE_PATH": str(filled.root.parent)})
    own = add(over, HASH, 1.0)
    over.touch(OLD)
    over.remember("ab", OLD, [])
    before = snapshot(filled.root)
    assert [removal.hash for removal in over.prune(ALL).removed] == [own]
    assert snapshot(filled.root) == before
    assert names(over.root / "used") == [OLD]
    assert names(over.root / "index") == ["ab.json"]
    Cache(over.layout).prune(ALL)
    assert names(over.root / "used") == names(over.root / "index") == []


def test_in_use(filled: Cache) -> None:
    use = filled.artifact(OLD).use()
    again = filled.use(OLD)
    for _ in range(2):
        pruned = filled.prune(ALL)
        assert pruned.in_use == (OLD,)
        assert hashes(filled) == names(filled.root / "binaries") == [OLD]
        use.close()
    del again
    gc.collect()
    assert [removal.hash for removal in filled.prune(ALL).removed] == [OLD]


def test_in_use_also_after_another_rank_was_published(filled: Cache) -> None:
    with filled.artifact(OLD).use():
        manifest = filled.artifact(OLD).manifest
        filled.publish(manifest, "rank_1_0", {}, [OLD], world_size=2)
        assert filled.prune(ALL).in_use == (OLD,)


def test_a_use_writes_nothing_and_works_through_a_link(filled: Cache, tmp_path: Path) -> None:
    before = snapshot(filled.root)
    (tmp_path / "link").symlink_to(filled.root / "artifacts" / OLD)
    with type(filled.artifact(OLD)).open(tmp_path / "link").use():
        assert snapshot(filled.root) == before
        assert filled.prune(ALL, dry_run=True).in_use == (OLD,)


def test_used_since_it_was_chosen(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxc.cache import choice, prune

    def and_then_used(entries: Iterable[choice.Entry], rules: Rules, now: float) -> choice.Choice:
        found = choose(entries, rules, now)
        filled.touch(OLD)
        return found

    choose = choice.choose
    monkeypatch.setattr(prune, "choose", and_then_used)
    pruned = filled.prune(ALL)
    assert ([removal.hash for removal in pruned.removed], pruned.in_use) == ([NEW], (OLD,))
    assert pruned.bytes > len(LIBRARY)
    assert hashes(filled) == [OLD]


def test_a_removed_artifact_cannot_be_held(filled: Cache) -> None:
    artifact = filled.artifact(OLD)
    filled.prune(ALL)
    with pytest.raises(CacheMissError, match=f"artifact {OLD} was removed just now"):
        artifact.use()


def test_binaries_stay_while_a_build_runs(filled: Cache, store: Callable[..., str]) -> None:
    orphan = store()
    with filled.building(), filled.building():
        pruned = filled.prune(Rules())
        assert (pruned.building, pruned.binaries) == (True, 0)
        assert filled.prune(Rules(), dry_run=True).building
        assert filled.binary(orphan) is not None
    pruned = filled.prune(Rules())
    assert (pruned.building, pruned.binaries) == (False, 1)


def test_many(cache: Cache) -> None:
    """Names only: what a prune of many artifacts opens, it closes."""
    before = len(os.listdir("/proc/self/fd"))
    for index in range(30):
        cache.publish(make_manifest(key.digest(str(index))), "rank_0_0", {}, [])
    assert len(cache.prune(Rules(keep_latest=3)).removed) == 27
    assert len(os.listdir("/proc/self/fd")) == before
