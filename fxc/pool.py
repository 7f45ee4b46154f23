"""The parent side of compiling: a pool of jobs, so many at a time."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from fxc._worker import Job, Reply
from fxc.errors import BuildError

_TUNING = re.compile(
    r"_?(AOT|AOTI|AOTINDUCTOR|AOT_INDUCTOR|ATEN|CUTEDSL|CUTLASS|INDUCTOR|TORCHDYNAMO|TORCHINDUCTOR|TORCH_COMPILE|TORCH_LOGS"
    r"|TORCH_TRACE|KMP|OMP|TRITON(?!_LIBCUDA_PATH$))(_|$)|ENABLE_(\w+_)?TMA_"
)
"""Variables that change what torch compiles, by which tool, or where it writes. They are no part of a binary's key.
TRITON_LIBCUDA_PATH only says where the driver is."""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the workers see of a build's environment: all but what would change a binary behind its key."""
    kept = {name: value for name, value in environ.items() if not _TUNING.match(name)}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking the CUDA runtime would forbid it to forked processes
        "TRITON_DISABLE_LINE_INFO": "1",  # tables for a debugger, which binaries are stripped of anyway
    }


class Pool:
    """Runs jobs in processes that are forked from one which has the compiler imported.

    Starting it takes seconds and does not block: start it before the work that comes first.
    """

    def __init__(self, jobs: int, directory: Path) -> None:
        """
        Args:
            jobs: how many may run at a time.
            directory: that of model.yaml, where modules that register ops may lie.
        """
        self.jobs = jobs
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fxc._worker", str(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment(os.environ), bufsize=0,
            start_new_session=True,  # Ctrl-C reaches the build alone, which ends this one
        )  # fmt: skip

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all jobs and wait for the end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.terminate()  # ends it while it imports; from then on the end of its stdin does
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def send(self, job: Job) -> None:
        """Start a job; the caller keeps no more than `jobs` running."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        except BrokenPipeError:
            raise self._lost() from None

    def receive(self) -> Reply:
        """Wait for a job to end."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._lost()
        return msgspec.json.decode(line, type=Reply)

    def _lost(self) -> BuildError:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        return BuildError(
            f"the compile workers ended unexpectedly with exit code {code}: {lines[-1] if lines else 'no message'}",
            "run `fxc doctor`; the machine may be out of memory" if code < 0 else "run `fxc doctor`",
        )
