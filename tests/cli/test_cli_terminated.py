"""SIGTERM in each phase of `fxc warm`: exit code 143, one line, nothing left behind. While it compiles, see
tests/e2e/test_killed.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import pytest

from fxc import identity, machine
from fxc.cache import Artifact, Cache
from fxc.ranks import Ranks
from fxc.spec import load_spec
from tests.cli.conftest import HASH, SPEC

HARNESS = """import sys, time, types
from fxc.cli import main

def wait(*_, **__):
    print("here", file=sys.stderr, flush=True)
    time.sleep(60)
"""
CAPTURE = """
from fxc import ready

def on_cuda(program, manifest):
    program.device = types.SimpleNamespace(type="cuda")
    program.capture = wait

ready._run_all = on_cuda
"""
WAYS = {
    "lookup": ("from fxc import refs; refs.find = wait", (HASH,)),
    "pull": ("from fxc.cache.remote import Remote; Remote.fetch = wait", (HASH, "--remote", "remote")),
    "turn": ("from fxc.cli import progress; progress.Lines.note = wait", ("model.yaml",)),
    "verify": ("from fxc.cache import Artifact; Artifact.verify = wait", (HASH,)),
    "load": ("import fxc.runtime.loader as loader; loader._execute = wait", (HASH,)),
    "first_step": ("from fxc.runtime.program import Program; Program.__call__ = wait", (HASH,)),
    "capture": (CAPTURE, (HASH,)),
}


@pytest.fixture
def held(tmp_path: Path) -> Callable[[str], AbstractContextManager[object]]:
    """What the phase needs to be reached."""

    def hold(phase: str) -> AbstractContextManager[object]:
        cache = Cache.open(tmp_path / "cache")
        if phase == "pull":
            os.rename(tmp_path / "cache", tmp_path / "built")
            command = [sys.executable, "-m", "fxc", "push", HASH, "--cache-dir", "built", "--remote", "remote"]
            subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        if phase != "turn":
            return nullcontext()
        (tmp_path / "model.yaml").write_text(json.dumps(SPEC))
        direct = identity.direct_key(
            load_spec(tmp_path / "model.yaml", (), None), machine.probe("cpu", compiler=False), Ranks()
        )
        return cache.lock(f"warm.{direct}")

    return hold


@pytest.mark.parametrize("phase", WAYS)
def test_terminated(
    artifact: Artifact, tmp_path: Path, phase: str, held: Callable[[str], AbstractContextManager[object]]
) -> None:
    patch, arguments = WAYS[phase]
    code = f"{HARNESS}\n{patch}\nsys.argv[1:] = {['warm', *arguments, '--json']}\nmain.main()"
    with held(phase):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, "FXC_CACHE_DIR": str(tmp_path / "cache")}, start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        seen: list[str] = []
        while (line := process.stderr.readline()) != "here\n":
            assert line, seen
            seen.append(line)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=50)
    assert process.returncode == 143, err
    error = {"code": 143, "kind": "Terminated", "message": "terminated", "hint": ""}
    assert msgspec.json.decode(out) == {"error": error}
    assert err.splitlines()[-1] == "fxc: error: terminated"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list((tmp_path / "cache" / "v1" / "staging").iterdir()) == []
