"""The child side of compiling: one process imports the compiler once, then forks a process for every job.

A job that crashes, hangs on to memory or changes the compiler's state harms no other. Requests and replies are JSON
lines on stdin and stdout; when stdin ends (the build is done, or was killed) every job is ended too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from fxc.jobs import CheckJob, Job, ProbeJob, Reply, TimeJob, TuneJob

DETAIL = 20_000
"""Characters of what a compiler printed that are kept: a pipe holds 65536 bytes before its writer has to wait."""


def run_job(job: Job) -> dict[str, Any]:
    """Do one job, in a process of its own."""
    from fxc import machine, piece_jobs

    if isinstance(job, ProbeJob):
        found: dict[str, Any] = msgspec.to_builtins(machine.probe(job.device))
        return found
    if isinstance(job, CheckJob):
        return piece_jobs.check_piece(job)
    if isinstance(job, TimeJob):
        return piece_jobs.time_piece(job)
    directory = job.directory
    plain = _plain(directory)
    job = msgspec.structs.replace(job, directory=plain)
    if isinstance(job, TuneJob):
        return piece_jobs.tune_piece(job)
    result = piece_jobs.compile_piece(job)
    return {k: value.replace(plain, directory) if isinstance(value, str) else value for k, value in result.items()}


def _plain(directory: str) -> str:
    """Another path of it if it has characters that Inductor's command lines do not survive, a space for one."""
    if shlex.quote(directory) == directory:
        return directory
    return f"/proc/{os.getpid()}/fd/{os.open(directory, os.O_RDONLY | os.O_DIRECTORY)}"


class _Child:
    """A running job."""

    def __init__(self, job: Job, pid: int, pipe: int) -> None:
        self.job = job
        self.pid = pid
        self.pipe = pipe
        self.data = b""
        self.start = time.perf_counter()

    @property
    def log(self) -> Path:
        return Path(self.job.directory) / f"{type(self.job).__name__}.log"

    def reply(self) -> Reply:
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # compilers it may have left
        seconds = time.perf_counter() - self.start
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.structs.replace(msgspec.json.decode(self.data, type=Reply), seconds=seconds)
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        number = os.waitstatus_to_exitcode(status)
        how = f"killed by {signal.Signals(-number).name}" if number < 0 else f"exit code {number}"
        return Reply(self.job.id, seconds, error=f"the process crashed ({how})", detail=log)


def _fork(job: Job, replies: int) -> _Child:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Child(job, pid, read)
    try:
        die_with_parent()
        os.setpgid(0, 0)
        os.close(read)
        os.close(replies)
        os.environ["TMPDIR"] = job.directory  # what a killed compiler leaves goes with it
        child = _Child(job, 0, write)
        log = os.open(child.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        try:
            reply = Reply(job.id, 0.0, result=run_job(job))
        except BaseException as error:
            text = traceback.format_exc()
            sys.stdout.flush()
            detail = text + child.log.read_text(errors="replace")
            reply = Reply(job.id, 0.0, error=_message(error), detail=detail[-DETAIL:])
        with os.fdopen(write, "wb") as pipe:
            pipe.write(msgspec.json.encode(reply))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # no atexit handlers, no destructors of what was loaded


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends, however that ends."""
    pr_set_pdeathsig = 1  # <sys/prctl.h>
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _message(error: BaseException) -> str:
    """One line: what the host compiler calls an error, else the first that reads like one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    compiler = [match[0] for match in map(_COMPILER_ERROR.search, lines) if match]
    marked = [line for line in lines if "error" in line.lower()]
    return f"{type(error).__name__}: {(compiler or marked or lines or [''])[0]}"


_COMPILER_ERROR = re.compile(r"\b(fatal )?error: .*")


def serve() -> None:
    """Fork a process for each request until stdin ends."""
    replies = os.dup(1)
    os.dup2(2, 1)  # nothing that is imported may print into the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build decides
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    from fxc import _torch_build

    _torch_build.preload()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on, the end of stdin ends the jobs too
    children: dict[int, _Child] = {}
    buffer = b""
    try:
        while True:
            for event, _ in selector.select():
                if event.fd == 0:
                    data = os.read(0, 1 << 20)
                    if not data:
                        return
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in lines:
                        child = _fork(msgspec.json.decode(line, type=Job), replies)
                        children[child.pipe] = child
                        selector.register(child.pipe, selectors.EVENT_READ)
                    continue
                child = children[event.fd]
                data = os.read(event.fd, 1 << 20)
                child.data += data
                if not data:
                    selector.unregister(event.fd)
                    os.close(event.fd)
                    del children[event.fd]
                    os.write(replies, msgspec.json.encode(child.reply()) + b"\n")
    finally:
        for child in children.values():
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    try:
        serve()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # tearing down all that was imported takes a second, for which the build would wait
