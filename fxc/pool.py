"""The parent side of compiling: a pool of jobs, so many at a time, in child processes or on a cluster."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import IO

import msgspec

from fxc.errors import BuildError
from fxc.jobs import Job, Message, Note, Ready, Refusal, Reply
from fxc.progress import Observer

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
    """Hands jobs to one process, which does each in a process of its own and reads JSON lines on stdin until the build
    is done; by default it forks them from itself, with the compiler imported.

    Starting it takes seconds and does not block: start it before the work that comes first.
    """

    def __init__(
        self, jobs: int | None, arguments: tuple[str, ...] = ("fxc._worker",), *,
        environ: Mapping[str, str] | None = None, cluster: str = "", observer: Observer | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            jobs: how many may run at a time; None where the process says so itself.
            arguments: the module to run, and its arguments.
            environ: its environment; what compilers may see of this process's by default.
            cluster: where it has jobs done, for people; without one it does them itself.
            observer: hears its notes.
        """
        self._jobs = jobs
        self._cluster = cluster
        self._observer = observer or Observer()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0,
            env=environment(os.environ) if environ is None else environ,
            start_new_session=True,  # Ctrl-C reaches the build alone, which ends this one
        )  # fmt: skip

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def jobs(self) -> int:
        """How many may run at a time.

        Raises:
            BuildError: there are no workers to be had.
        """
        while self._jobs is None:
            self._hear()
        return self._jobs

    def close(self) -> None:
        """End all jobs and wait for the end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.terminate()  # ends it while it imports; from then on the end of its stdin does
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)  # a cluster that was started for it takes longest
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
        """Wait for a job to end.

        Raises:
            BuildError: the workers cannot do any, or are gone.
        """
        while (reply := self._hear()) is None:
            pass
        return reply

    def has_news(self, seconds: float) -> bool:
        """Whether `receive` would not have to wait for long; waits itself so long at most."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _hear(self) -> Reply | None:
        """Take in one message."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._lost()
        message: Message = msgspec.json.decode(line, type=Message)
        match message:
            case Reply():
                return message
            case Note():
                self._observer.note(message.text)
            case Ready():
                self._jobs = self._jobs or message.jobs
            case Refusal():
                error = BuildError(message.message, message.hint)
                error.add_note(self._printed())
                raise error
        return None

    def _lost(self) -> BuildError:
        self._process.wait()
        log, code = self._printed(), self._process.returncode
        if self._cluster:
            message = f"{self._cluster} is lost"
            error = BuildError(message, "build again: what was compiled is kept; `-v` shows what Ray said")
        else:
            last = log.rpartition("\n")[2] or "no message"
            hint = "run `fxc doctor`; the machine may be out of memory" if code < 0 else "run `fxc doctor`"
            error = BuildError(f"the compile workers ended unexpectedly with exit code {code}: {last}", hint)
        error.add_note(log)
        return error

    def _printed(self) -> str:
        descriptor = self._log.fileno()  # whose position the process shares
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace").strip()
