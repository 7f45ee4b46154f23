"""Whatever a user's code does, the command line says what happened in one line, and stdout holds the result alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fxc.cli.main import run
from tests.e2e import world
from tests.e2e.world import FXC, Project

Fresh = Callable[..., Project]

MODELS = """import os
import sys
import threading
import time

import torch
from torch import nn


class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x)


class Odd(BaseException):
    pass


def interrupts():
    raise KeyboardInterrupt


def exits():
    sys.exit("bye")


def odd():
    raise Odd("strange")


def breaks():
    raise ValueError("two\\nlines")


def prints():
    print("from python")
    os.write(1, b"from C\\n")
    os.system("echo from a child")
    return Good()


def threads():
    threading.Thread(target=time.sleep, args=(600,)).start()
    return Good()


class Raises(Good):
    def forward(self, x):
        raise ValueError("no such thing")


class Branches(Good):
    def forward(self, x):
        if x.sum() > 0:  # which way?
            return x + 1
        return self.linear(x)


class Exits(Good):
    def forward(self, x):
        sys.exit(4)


class PrintsInForward(Good):
    def forward(self, x):
        print("tracing")
        return self.linear(x)
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    yaml = world.PLAIN_YAML.replace("./plain.py:Plain", "./models.py:Good").replace("{width: 16}", "{}")
    return world.make(tmp_path / "with space", tmp_path / "cache", {"models.py": MODELS, "model.yaml": yaml})


def build(project: Project, name: str, *arguments: str) -> int:
    target = f"model.target=./models.py:{name}"
    return run(["build", str(project.yaml), "--set", target, "--cache-dir", str(project.cache), "-O0", *arguments])


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("interrupts", 130, "interrupted"),
        ("exits", 1, "the model's code called sys.exit('bye')"),
        ("odd", 1, "the model's code raised Odd: strange"),
        ("breaks", 2, "model.target: breaks() raised ValueError: two lines (models.py:36)"),
        ("Exits", 1, "the model's code called sys.exit(4)"),
        ("Raises", 1, "Raises cannot be traced: no such thing at {folder}/models.py:53: raise ValueError("),
        ("Branches", 1, "Branches cannot be traced: Could not guard on data-dependent expression"),
        ("Branches", 1, " at {folder}/models.py:58: if x.sum() > 0:  # which way?"),
    ],
)
def test_code_that_fails(
    project: Project, capfd: pytest.CaptureFixture[str], name: str, code: int, message: str
) -> None:
    assert build(project, name, "-q") == code
    out, err = capfd.readouterr()
    assert out == ""
    first, *hints = err.splitlines()
    assert first.startswith("fxc: error: ")
    assert message.format(folder=project.folder) in first
    assert len(hints) <= 1, err
    assert not hints or hints[0].startswith("hint: ")


@pytest.mark.parametrize("name", ["prints", "PrintsInForward"])
def test_stdout_is_the_result_alone(project: Project, capfd: pytest.CaptureFixture[str], name: str) -> None:
    assert build(project, name, "--json", "-q") == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    assert json.loads(out)["hit"] is False
    if name == "prints":
        assert {"from python", "from C", "from a child"} <= set(err.splitlines())


def test_threads_do_not_keep_it_alive(project: Project) -> None:
    result = project.build("-O0", "--set", "model.target=./models.py:threads")
    assert result["hash"]


@pytest.mark.parametrize("verb", ["build", "build --json", "ls --json", "--version"])
def test_streams_that_cannot_be_written(project: Project, verb: str) -> None:
    assert build(project, "Good", "-q") == 0
    words = verb.split()
    more = [str(project.yaml), "--set", "model.target=./models.py:Good", "-O0"] if "build" in verb else []
    line = " ".join(f"'{word}'" for word in [*FXC, *words, *more])
    for redirection, code, told in [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "fxc: error: cannot write the result to stdout: No space left on device"),
    ]:
        done = subprocess.run(
            ["bash", "-c", f"{line} {redirection}"], env=project.environ(), capture_output=True, text=True, check=False
        )
        assert done.returncode == code, (redirection, done)
        assert told in done.stderr
        assert "Traceback" not in done.stderr
        assert (done.stdout == "") == (redirection != "2>&-")


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("/nonexistent/g++", "there is no C++ compiler: CXX is '/nonexistent/g++', which does not run"),
        ("clang++-99", "there is no C++ compiler: CXX is 'clang++-99', which does not run"),
    ],
)
def test_no_compiler(project: Project, cxx: str, message: str) -> None:
    done = project.fxc("build", str(project.yaml), environ={"CXX": cxx})
    assert (done.code, done.err.splitlines()[0]) == (1, f"fxc: error: {message}")  # before anything is traced


def test_no_strip(project: Project, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").symlink_to(str(shutil.which("g++")))
    done = project.fxc("build", str(project.yaml), "-q", environ={"PATH": str(tmp_path / "bin")})
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[0] == "fxc: error: there is no `strip` on PATH, which binaries are made small with"


BROKEN = """#!/bin/sh
case "$*" in
  *--version*) echo 'g++ (Debian) 12.2.0' ;;
  *-fsyntax-only*) ;;
  *) echo 'model.cpp:7:3: note: here' >&2; echo 'model.cpp:7:3: error: cannot frobnicate' >&2; exit 1 ;;
esac
"""


def test_a_compiler_error_names_piece_shape_and_reason(project: Project, tmp_path: Path) -> None:
    script = tmp_path / "broken-g++"
    script.write_text(BROKEN)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    done = project.fxc("build", str(project.yaml), "--json", "-q", environ={"CXX": str(script)})
    assert done.code == 1
    error = done.json["error"]
    assert error["kind"] == "CompileError"
    assert error["message"].startswith("piece_0 n=1..64 does not compile: ")
    assert error["message"].endswith("error: cannot frobnicate")
    assert project.settle() == []
    assert list((project.root / "staging").iterdir()) == []


NOISY = """import itertools

import torch
from torch import nn

count = itertools.count()


@torch.library.custom_op("unsteady::add", mutates_args=())
def add(x: torch.Tensor) -> torch.Tensor:
    return x + next(count)


@add.register_fake
def _(x):
    return torch.empty_like(x)


class Unsteady(nn.Module):
    def forward(self, x):
        return torch.relu(add(x.sin()))
"""


def test_a_failed_proof_is_named(fresh: Fresh, tmp_path: Path) -> None:
    """An op that gives another answer at each call is one that no proof can pass."""
    project = fresh()
    (project.folder / "unsteady.py").write_text(NOISY)
    sets = ("--set", "model.target=./unsteady.py:Unsteady", "--set", "model.args={}")
    done = project.fxc("build", str(project.yaml), "--json", "-q", *sets)
    assert done.code == 1
    error = done.json["error"]
    assert error["kind"] == "ProofError"
    assert error["message"].startswith("piece_0 n=1..64 does not equal eager: result 0 at n=1: relative error")
    assert not any(os.listdir(project.root / "artifacts"))
