"""Several `fxc warm` of one model.yaml at once, as processes: one builds, the others wait, and take over where it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e import world
from tests.e2e.world import FXC, Project

SLOW = """import os, time
from pathlib import Path
import torch


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        (Path(__file__).with_name(f"building.{os.getpid()}")).touch()
        while Path(__file__).with_name("hold").exists():
            time.sleep(0.02)

    def forward(self, x):
        return self.linear(x)
"""
YAML = """model: {target: "./slow.py:Slow"}
device: cpu
inputs: {x: {shape: [n, 4], dtype: float32}}
dims: {n: {min: 1, max: 8}}
compile: {level: 0}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A model whose build takes as long as the file `hold` is there. It compiles nothing."""
    made = world.make(tmp_path / "slow", tmp_path / "cache", {"slow.py": SLOW, "model.yaml": YAML})
    (made.folder / "hold").touch()
    return made


def release(project: Project) -> None:
    (project.folder / "hold").unlink()


def builders(project: Project) -> int:
    return len([*project.folder.glob("building.*")])


@contextmanager
def warm(project: Project, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*FXC, "warm", str(project.yaml), "--json", *arguments]
    process = subprocess.Popen(
        command, env=project.environ(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def building(project: Project) -> Iterator[subprocess.Popen[str]]:
    """One that is in the middle of it."""
    with warm(project) as process:
        while not builders(project):
            assert process.poll() is None
            time.sleep(0.02)
        yield process


def told_to_wait(process: subprocess.Popen[str], project: Project, seconds: float) -> None:
    assert process.stderr is not None
    words = f"another process is building {project.yaml}: waiting for it, {seconds:g} s at most"
    assert f"{words}\n" in iter(process.stderr.readline, "")


def finish(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    result: dict[str, object] = json.loads(out)
    return result


def test_one_builds_and_the_others_have_it(project: Project) -> None:
    with building(project) as first, warm(project, "--wait", "10m") as second, warm(project) as third:
        told_to_wait(second, project, 600)
        told_to_wait(third, project, 3600)
        release(project)
        results = [finish(process) for process in (first, second, third)]
    assert builders(project) == 1
    assert [(result["built"], result["hit"]) for result in results] == [(True, False), (False, True), (False, True)]
    assert len({str(result["hash"]) for result in results}) == 1


def test_a_killed_builder_is_replaced(project: Project) -> None:
    with building(project) as first, warm(project) as second:
        told_to_wait(second, project, 3600)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        while builders(project) < 2:
            assert second.poll() is None
            time.sleep(0.02)
        release(project)
        result = finish(second)
    assert (result["built"], result["hit"]) == (True, False)
    assert list((project.root / "staging").iterdir()) == []


def test_waited_long_enough(project: Project) -> None:
    """It builds too, and succeeds; the first one is none the worse for it."""
    with building(project) as first, warm(project, "--wait", "0.2s") as second:
        told_to_wait(second, project, 0.2)
        while builders(project) < 2:
            assert second.poll() is None
            time.sleep(0.02)
        release(project)
        results = [finish(process) for process in (first, second)]
    assert results[0]["hash"] == results[1]["hash"]
    assert results[1]["ready"] is True
    assert project.fxc("verify").code == 0
