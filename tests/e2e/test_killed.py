"""Builds that are killed, interrupted, and run many at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fxc.cache import Cache
from tests.e2e.world import TORTURE, Project

Fresh = Callable[..., Project]
KILLS = 20 if TORTURE else 2
BUILDERS = 8 if TORTURE else 3
SIZES = ("-O2", "--jobs", "2")
"""Two binaries: one for n = 4, one for the rest."""


class Readers:
    """Opens and checks whatever is in the cache, again and again."""

    def __init__(self, cache: Path) -> None:
        self.cache = Cache.open(cache)
        self.seen = 0
        self.wrong: list[Exception] = []
        self.stop = threading.Event()

    def read(self) -> None:
        while not self.stop.is_set():
            try:
                for entry in self.cache.list():
                    assert entry.manifest is not None, f"{entry.hash} is half there"
                    assert self.cache.artifact(entry.hash).verify() >= 4
                    self.seen += 1
            except Exception as error:
                self.wrong.append(error)
            time.sleep(0.002)


@contextmanager
def readers(cache: Path) -> Iterator[Readers]:
    reading = Readers(cache)
    thread = threading.Thread(target=reading.read)
    thread.start()
    try:
        yield reading
    finally:
        reading.stop.set()
        thread.join()
    assert reading.wrong == []


def end(process: subprocess.Popen[str], number: int, group: bool) -> None:
    """Kill it, if it has not ended by itself."""
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(process.pid, number)


def check_whole(project: Project, hash: str) -> None:
    assert project.fxc("verify", hash).code == 0
    assert list((project.root / "staging").iterdir()) == []
    assert [path.name for path in (project.root / "artifacts").iterdir()] == [hash]


def test_killed_at_random_moments(fresh: Fresh) -> None:
    """SIGKILL, by turns to the build alone and to its process group: what follows is a good artifact, nothing stays
    behind, and a reader sees all of it or nothing."""
    project = fresh()
    chance = random.Random(os.environ.get("FXC_TORTURE", "1"))
    span = 15.0
    with readers(project.cache) as reading:
        for turn in range(KILLS):
            start = time.perf_counter()
            with project.start(*SIZES) as process:
                try:
                    process.wait(timeout=chance.uniform(0.2, span))
                    span = min(span, time.perf_counter() - start)
                except subprocess.TimeoutExpired:
                    end(process, signal.SIGKILL, group=turn % 2 == 0)
                process.communicate()
                assert process.returncode in (0, -signal.SIGKILL)
        result = project.build(*SIZES)
        deadline = time.monotonic() + 60
        while not reading.seen and time.monotonic() < deadline:
            time.sleep(0.01)
    assert reading.seen
    assert project.settle() == []
    check_whole(project, result["hash"])


def test_work_done_before_a_kill_is_reused(fresh: Fresh) -> None:
    project = fresh()
    with project.start("-O2", "--jobs", "1") as process:
        while not any(project.root.glob("binaries/*/record.json")):
            assert process.poll() is None
            time.sleep(0.02)
        end(process, signal.SIGKILL, group=False)
        process.communicate()
    assert any((project.root / "staging").iterdir())
    result = project.build("-O2", "--jobs", "1")
    assert result["binaries"] == {"compiled": 1, "reused": 1}
    assert project.settle() == []
    check_whole(project, result["hash"])


def test_builds_at_once_compile_each_binary_once(fresh: Fresh) -> None:
    project = fresh()
    with readers(project.cache):
        running = [project.start(*SIZES) for _ in range(BUILDERS)]
        results = []
        for process in running:
            out, err = process.communicate(timeout=500)
            assert process.returncode == 0, err
            results.append(json.loads(out))
    assert len({result["hash"] for result in results}) == 1
    assert sum(result["binaries"]["compiled"] for result in results) == 2
    for result in results:
        assert sum(result["binaries"].values()) == 2
    check_whole(project, results[0]["hash"])


@pytest.mark.parametrize(
    ("verb", "number", "code", "kind"),
    [("build", signal.SIGINT, 130, "Interrupted"), ("warm", signal.SIGTERM, 143, "Terminated")],
)
def test_interrupted_while_compiling(fresh: Fresh, verb: str, number: int, code: int, kind: str) -> None:
    """As Ctrl-C does it: to the whole foreground group."""
    project = fresh()
    with project.start(*SIZES, verb=verb) as process:
        while not any("cc1plus" in line for line in project.processes()):
            assert process.poll() is None
            time.sleep(0.05)
        end(process, number, group=True)
        out, err = process.communicate(timeout=60)  # well before the compilers would have ended by themselves
    assert process.returncode == code, err
    assert json.loads(out)["error"]["kind"] == kind
    assert err.splitlines()[-1] == f"fxc: error: {kind.lower()}"
    assert project.settle() == []
    assert list((project.root / "staging").iterdir()) == []
