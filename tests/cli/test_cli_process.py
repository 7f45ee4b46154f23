"""The program as a process: what it imports, signals, pipes."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fxc.cache import Artifact
from fxc.cli.main import MODULES, VERBS

LIST = (
    "import sys; from fxc.cli.main import run; code = run(sys.argv[1:]); print('|'.join(sys.modules)); sys.exit(code)"
)
HEAVY = {"torch", "numpy", "sympy", "triton", "transformers"}


def spawn(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "FXC_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=environ, check=False
    )


@pytest.mark.parametrize("line", ["--help", "--version", "build --help", "schema", "ls", "inspect abcd", "verify"])
def test_light_verbs_import_nothing_heavy(artifact: Artifact, tmp_path: Path, line: str) -> None:
    done = spawn("-c", LIST, *line.split(), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.splitlines()[-1].split("|"))
    assert not modules & HEAVY
    assert "fxc.cli.main" in modules


def test_help_imports_no_verb(tmp_path: Path) -> None:
    """Typer alone: what a verb needs is imported with it."""
    done = spawn("-X", "importtime", "-m", "fxc", "--help", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    own = {name for name in modules if name.partition(".")[0] == "fxc"}
    assert own == {"fxc", "fxc.errors", "fxc.cli", "fxc.cli.main", "fxc.cli.streams"}
    assert not modules & {*HEAVY, "msgspec", "rich", "yaml", "fsspec", "pydantic", "importlib.metadata", "asyncio"}


def test_help_lists_every_verb(tmp_path: Path) -> None:
    commands = spawn("-m", "fxc", "--help", cache=tmp_path).stdout.partition("Commands:")[2]
    assert dict(re.findall(r"^  (\w+) +(.+)$", commands, re.MULTILINE)) == VERBS
    for verb in VERBS:
        module = importlib.import_module(f"fxc.cli.{MODULES.get(verb, verb)}")
        assert hasattr(module, "app") or module.run.__doc__, verb


def test_version(tmp_path: Path) -> None:
    done = spawn("-m", "fxc", "--version", cache=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"fxc {importlib.metadata.version('fxc')}\n")


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    done = spawn("-m", "fxc", "inspect", "abcd", "--json", cache=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == 3
    assert done.stderr.startswith("fxc: error: no artifact abcd")


def test_reader_that_leaves(tmp_path: Path) -> None:
    line = f"{sys.executable} -m fxc schema | true; {sys.executable} -m fxc ls --json | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr in ("", f"no artifacts in {tmp_path}\n")


@pytest.mark.parametrize(
    ("number", "code", "kind"), [(signal.SIGTERM, 143, "Terminated"), (signal.SIGINT, 130, "Interrupted")]
)
def test_signals_end_it_cleanly(tmp_path: Path, number: signal.Signals, code: int, kind: str) -> None:
    fifo = tmp_path / "model.yaml"  # reading it blocks until somebody writes
    os.mkfifo(fifo)
    waits = (
        "import sys, time; from fxc.cli import main, schema; sys.argv[1:] = ['schema', '--json']\n"
        "def wait(): print('here', file=sys.stderr, flush=True); time.sleep(30)\n"
        "schema.json_schema = wait; main.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "here\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert json.loads(out)["error"] == {"code": code, "kind": kind, "message": kind.lower(), "hint": ""}
    assert err == f"fxc: error: {kind.lower()}\n"
