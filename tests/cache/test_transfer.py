from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fxc.cache.transfer import Patience, each, persistently, watched
from fxc.errors import CacheIOError, DamagedError

QUICK = Patience(tries=3, pause=0.001, stall=0.2, parallel=2)
Beat = Callable[[], None]


def failing(*errors: BaseException) -> tuple[Callable[[Beat], str], list[int]]:
    """Raises these, one a call, then answers; and the calls so far."""
    left, calls = [*errors], []

    def call(beat: Beat) -> str:
        calls.append(1)
        if left:
            raise left.pop(0)
        return "done"

    return call, calls


def test_tried_again() -> None:
    call, calls = failing(OSError("reset"), ValueError("a library's own"))
    assert persistently(call, "read x", QUICK) == "done"
    assert len(calls) == 3


def test_given_up() -> None:
    call, calls = failing(*[OSError("reset  by\npeer")] * 3)
    with pytest.raises(CacheIOError, match="cannot read x, tried 3 times: reset by peer") as caught:
        persistently(call, "read x", QUICK)
    assert len(calls) == 3
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("error", [FileNotFoundError("x"), DamagedError("x")])
def test_answers_are_not_asked_for_again(error: Exception) -> None:
    call, calls = failing(error)
    with pytest.raises(type(error)):
        persistently(call, "read x", QUICK)
    assert len(calls) == 1


def test_permission() -> None:
    call, calls = failing(PermissionError("Forbidden"))
    with pytest.raises(CacheIOError, match="cannot read x: Forbidden") as caught:
        persistently(call, "read x", QUICK)
    assert (len(calls), caught.value.hint) == (1, "check the credentials")


def test_stalled() -> None:
    release = threading.Event()
    turns: list[int] = []

    def call(beat: Beat) -> str:
        turns.append(1)
        if len(turns) == 1:
            release.wait(20)
        return "done"

    start = time.monotonic()
    assert persistently(call, "read x", QUICK) == "done"
    assert 0.2 <= time.monotonic() - start < 15
    release.set()


def test_slow_is_not_stalled() -> None:
    def call(beat: Beat) -> str:
        for _ in range(8):
            time.sleep(0.05)
            beat()
        return "done"

    assert watched(call, 0.2) == "done"


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    call, _ = failing(*[OSError()] * 4)
    persistently(call, "read x", Patience(tries=5, pause=1.0))
    assert len(pauses) == 4
    for turn, pause in enumerate(pauses):
        assert 2**turn <= pause <= 1.5 * 2**turn


def test_several_at_once() -> None:
    together = threading.Barrier(2, timeout=10)
    assert sorted(each(range(4), lambda item: (together.wait(), item)[1], QUICK)) == [0, 1, 2, 3]


def test_the_first_failure_ends_it() -> None:
    begun: list[int] = []
    ended = threading.Event()

    def work(item: int) -> int:
        begun.append(item)
        if item == 0:
            raise ValueError("no")
        ended.wait(20)
        return item

    with pytest.raises(ValueError, match="no"):
        list(each(range(100), work, QUICK))
    ended.set()
    time.sleep(0.2)
    assert len(begun) < 10
