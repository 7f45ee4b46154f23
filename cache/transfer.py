"""Calls over a network: several at once, tried again when they fail, given up when nothing moves."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import msgspec

from fxc.errors import CacheIOError, FxcError

T = TypeVar("T")
Item = TypeVar("Item")

Beat = Callable[[], None]
"""Called at each sign of life."""
FINAL = (FileNotFoundError, PermissionError, NotImplementedError, FxcError)
"""Answers, not faults: asking again gives the same."""


class Patience(msgspec.Struct, frozen=True):
    tries: int = 5
    pause: float = 0.2
    """Seconds before the second try; twice as many before each further one, and up to half of that more by chance, so
    that a hundred machines do not come back at once."""
    stall: float = 30.0
    """Seconds without a sign of life after which a call is given up."""
    parallel: int = 16


class StalledError(OSError):
    """Nothing has moved for too long."""


class DamagedOnArrivalError(OSError):
    """What came is not what was asked for."""


def persistently(call: Callable[[Beat], T], what: str, patience: Patience) -> T:
    """`call`'s answer, tried again while it fails. It is given a function to call at each sign of life.

    Raises:
        FileNotFoundError: there is no such thing.
        CacheIOError: it failed at every try; `what` and the last reason are named.
    """
    last: BaseException | None = None
    for turn in range(patience.tries):
        if turn:
            time.sleep(patience.pause * 2 ** (turn - 1) * random.uniform(1, 1.5))
        try:
            return watched(call, patience.stall)
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise CacheIOError(f"cannot {what}: {_words(error)}", "check the credentials") from error
        except FINAL:
            raise
        except Exception as error:  # a file system of fsspec raises what its library does
            last = error
    hint = "check the address and the network; what came so far is kept"
    raise CacheIOError(f"cannot {what}, tried {patience.tries} times: {_words(last)}", hint) from last


def watched(call: Callable[[Beat], T], stall: float) -> T:
    """Run it in a thread of its own, which is left behind when it stalls: a blocked call cannot be ended.

    Raises:
        StalledError: no sign of life for `stall` seconds.
    """
    signs = [time.monotonic()]
    done = threading.Event()
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call(lambda: signs.__setitem__(0, time.monotonic()))
        except BaseException as error:
            outcome["error"] = error
        done.set()

    threading.Thread(target=run, daemon=True, name="fxc transfer").start()
    while not done.wait(max(0.0, signs[0] + stall - time.monotonic())):
        if time.monotonic() - signs[0] >= stall:
            raise StalledError(f"nothing moved for {stall:g} s")
    if "error" in outcome:
        raise outcome["error"]
    value: T = outcome["value"]
    return value


def each(items: Iterable[Item], work: Callable[[Item], T], patience: Patience) -> Iterator[T]:
    """`work`'s answers as they come, several at once. The first failure ends it: what has not begun never does."""
    pool = ThreadPoolExecutor(patience.parallel, thread_name_prefix="fxc remote")
    try:
        for future in as_completed([pool.submit(work, item) for item in items]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, calls that hang are not waited for


def _words(error: BaseException | None) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"
