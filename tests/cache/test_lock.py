from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fxc.cache import Cache
from fxc.errors import CacheIOError

HOLD = """
import sys, time
from pathlib import Path
from fxc.cache import Cache
with getattr(Cache.open(Path(sys.argv[1])), sys.argv[2])(*sys.argv[3:]) as place:
    if place:
        (place / "half").mkdir()
    print(place, flush=True)
    time.sleep(60)
"""


def hold(cache: Cache, *call: str) -> tuple[subprocess.Popen[str], str]:
    """A process that holds a lock or a staging directory, and what it printed."""
    command = [sys.executable, "-c", HOLD, str(cache.root.parent), *call]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def test_one_at_a_time_among_threads(cache: Cache) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        with cache.lock("x"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5


def test_other_names_do_not_wait(cache: Cache) -> None:
    with cache.lock("x"), cache.lock("y"), cache.staging():
        pass


def test_a_killed_process_holds_nothing(cache: Cache) -> None:
    child, _ = hold(cache, "lock", "x")
    taken = threading.Event()

    def take(lock: AbstractContextManager[None]) -> None:
        with lock:
            taken.set()

    waiter = threading.Thread(target=take, args=(cache.lock("x"),))
    waiter.start()
    try:
        assert not taken.wait(0.2)
    finally:
        kill(child)
    assert taken.wait(60)
    waiter.join()


def test_an_error_inside_is_not_the_caches(cache: Cache) -> None:
    with pytest.raises(FileNotFoundError), cache.lock("x"):
        raise FileNotFoundError
    with pytest.raises(FileNotFoundError), cache.staging():
        raise FileNotFoundError
    with cache.lock("x"):
        pass


def test_staging_is_removed_afterwards(cache: Cache) -> None:
    with cache.staging() as path:
        (path / "file").touch()
        assert path.parent == cache.root / "staging"
    assert list((cache.root / "staging").iterdir()) == []


def test_only_staging_of_dead_processes_is_swept(cache: Cache) -> None:
    living, theirs = hold(cache, "staging")
    dead, left = hold(cache, "staging")
    try:
        kill(dead)
        (cache.root / "staging" / "killed_before_its_lock").mkdir()
        (cache.root / "staging" / "killed_after_removal.alive").touch()
        with cache.staging() as mine:
            there = {path for path in (cache.root / "staging").iterdir() if path.suffix != ".alive"}
            assert there == {mine, Path(theirs)}
        assert not Path(left).exists()
        assert (Path(theirs) / "half").is_dir()
    finally:
        kill(living)
    with cache.staging() as mine:
        assert [path.name for path in sorted(mine.parent.iterdir())] == [mine.name, f"{mine.name}.alive"]


def test_a_lock_that_cannot_be_made(cache: Cache) -> None:
    (cache.root / "locks" / "x.lock").mkdir(parents=True)
    with pytest.raises(CacheIOError, match=r"cannot lock .*x\.lock: Is a directory"):
        cache.lock("x").__enter__()


def test_a_lock_that_somebody_holds_is_not_waited_for(cache: Cache) -> None:
    with cache.lock("x"), cache.try_lock("x") as held:
        assert held is False
    with cache.try_lock("x") as held:
        assert held is True
        with cache.try_lock("x") as again:
            assert again is False
    with pytest.raises(BlockingIOError), cache.try_lock("x"):
        raise BlockingIOError
    with cache.lock("x"):
        pass


def test_turns(cache: Cache) -> None:
    """Waited for, held, and gone on without."""
    told: list[int] = []

    def waiting() -> None:
        told.append(1)

    with cache.turn("x", 0, waiting) as waited:
        assert (waited, told) == (False, [])
        with cache.try_lock("x") as free:
            assert not free
        start = time.monotonic()
        with cache.turn("x", 0.3, waiting) as again:
            assert (again, told) == (True, [1])
        assert 0.3 <= time.monotonic() - start < 30
    child, _ = hold(cache, "lock", "x")
    threading.Timer(0.3, child.kill).start()
    with cache.turn("x", 30, waiting) as waited, cache.try_lock("x") as free:
        assert (waited, free, told) == (True, False, [1, 1])
    kill(child)


def test_a_lock_whose_file_was_removed(cache: Cache) -> None:
    """Whoever waits for it takes the new one, so that two never hold the same name."""
    inside: list[int] = []

    def work() -> None:
        with cache.lock("x"):
            inside.append(1)

    with cache.lock("x"):
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.1)
        (cache.root / "locks" / "x.lock").unlink()
        with cache.try_lock("x") as free:
            assert free
    thread.join()
    assert inside == [1]
