"""What the tests of the examples and of README.md share: one cache with tiny_llama in it, built as a user builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Built(NamedTuple):
    environ: dict[str, str]
    """In it, `fxc` and `python` are this interpreter's, FXC_CACHE_DIR is the cache and HASH the artifact's."""
    log: str
    """What `fxc build` said on stderr."""

    def shell(self, script: str, *, both: bool = False) -> str:
        """stdout of a bash script that runs in the repository's root and must succeed; stderr too if `both`."""
        done = run(script, self.environ)
        return done.stdout + done.stderr if both else done.stdout


def run(script: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """examples/tiny_llama.yaml, built in an empty cache."""
    cache = tmp_path_factory.mktemp("examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "FXC_CACHE_DIR": str(cache)}
    done = run("fxc build examples/tiny_llama.yaml", environ)
    return Built({**environ, "HASH": done.stdout.strip()}, done.stderr)
