"""How samples become numbers, and in which order things are called."""

from __future__ import annotations

from functools import partial

import pytest

from fxc import timing
from fxc.timing import Timing, measure, summary


def test_summary() -> None:
    steps = [0.004, 0.001, 0.003, 0.002, 0.005]
    assert summary(steps, []) == Timing(step_us=3000, low_us=2000, high_us=4000, host_us=3000)
    assert summary(steps, [0.0003, 0.0001, 0.0002]).host_us == 200
    assert summary([0.001], []) == Timing(step_us=1000, low_us=1000, high_us=1000, host_us=1000)


def test_variants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: each is warmed up, and then one sample of each, beginning with another one each time."""
    monkeypatch.setattr(timing, "SAMPLE", 0)
    called: list[str] = []
    found = measure({name: partial(called.append, name) for name in "abc"}, 3, None)
    assert "".join(called) == "aaabbbccc" + "abc" + "bca" + "cab"
    assert list(found) == ["a", "b", "c"]
    assert all(times.host_us == times.step_us > 0 for times in found.values())


def test_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host time is of one call on an idle device; a step is of five, and the wait after them."""
    monkeypatch.setattr(timing, "SAMPLE", 0)
    done: list[str] = []
    measure({"a": partial(done.append, "a")}, 1, partial(done.append, "."))
    assert "".join(done) == ".a.." + "a.." + "a.." + "a." + "aaaaa."


def test_short_calls_fill_a_sample() -> None:
    called: list[None] = []
    measure({"a": partial(called.append, None)}, 1, None)
    assert len(called) == timing.WARMING + timing.MOST_CALLS
