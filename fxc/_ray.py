"""Stands between a build and a Ray cluster, as `fxc._worker` does between a build and its own processes: each job is a
task, and what a task returns is written where the job wants it.

A process of its own, as Ray ends the process that is connected to a cluster when that is lost, takes its signal
handlers, and prints. When stdin ends (the build is done, or was killed) every task is ended.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import exceptions

from fxc import ray_node
from fxc.errors import BuildError
from fxc.jobs import CheckJob, Cluster, CompileJob, Job, Message, Note, ProbeJob, Ready, Refusal, Reply, UserOps

TRIES = 3
"""How often a job is given to the cluster whose workers get lost, and a client server is asked that starts none."""
LOST = (
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.ObjectLostError,
    exceptions.OutOfMemoryError,
)
"""How the loss of a worker, or of a node that holds a result, shows."""
RUNS = "`ray status` shows whether it runs"
TAKES = (
    "ray:HOST:PORT takes the cluster's port (6379), ray://HOST:PORT that of Ray's client server (10001); "
    "if the cluster asks for a token, set RAY_AUTH_MODE=token"
)
"""Why something that listens may not answer: Ray sends a token to an address only when it is told to."""
SAME = "install the same ray, fxc and torch on all of its nodes"
_HOST = re.compile(r"(?:ray://)?\[?([^/\[\]]+)\]?:([0-9]+)")


class _Task:
    """A job on the cluster."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tries = 0
        self.ref: Any = None


class Driver:
    """Gives jobs to the cluster, and says what became of them."""

    def __init__(self, cluster: Cluster, say: Callable[[Message], None]) -> None:
        self.cluster = cluster
        self.say = say
        self.ended: queue.SimpleQueue[bytes | tuple[int, Future[bytes]]] = queue.SimpleQueue()
        """Lines of stdin, empty at its end, and tasks by the id of their job."""
        self.tasks: dict[int, _Task] = {}
        self.sources: dict[UserOps, Any] = {}
        self.share = 1
        self.gpus = int(cluster.target.device == "cuda")
        """That a task has for itself."""
        self.run: Any = ray.remote(ray_node.run)

    def connect(self) -> None:
        """Find or start the cluster, and say how much it does at once.

        Raises:
            BuildError: there is none, or it takes nothing from here.
        """
        address = self.cluster.address or os.environ.get("RAY_ADDRESS", "")
        where = f"at {address}" if address else "on this machine"
        try:
            _require_reachable(address)
        except OSError as error:
            raise BuildError(f"there is no Ray cluster {where}: {_line(error)}", RUNS) from error
        try:
            self._connect(address, where)
        except Exception as error:
            hint = TAKES if _HOST.fullmatch(address) else RUNS
            raise BuildError(f"the Ray cluster {where} cannot be used: {_line(error)}", hint) from error
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on, the end of stdin ends it
        kind = "GPU" if self.gpus else "CPU"
        slots = [node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]]
        if not self.gpus:
            self.share = max(1, *map(int, slots))
        self.say(Ready(self.cluster.jobs or max(1, int(sum(slots)))))

    def _connect(self, address: str, where: str) -> None:
        """Again where a client server fails to start the process that is to serve this one, as busy ones do."""
        for left in reversed(range(TRIES)):
            try:
                ray.init(address or None, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
                return
            except ConnectionAbortedError as error:
                if not left:
                    raise
                self.say(Note(f"the Ray cluster {where} does not serve this build: {_line(error)}; it is asked again"))

    def serve(self) -> None:
        """Do what comes until stdin ends."""
        threading.Thread(target=self._read, daemon=True).start()
        while event := self.ended.get():
            if isinstance(event, bytes):
                task = _Task(msgspec.json.decode(event, type=Job))
                self.tasks[task.job.id] = task
                self._start(task)
            else:
                number, future = event
                self._end(self.tasks[number], future)

    def close(self) -> None:
        """End all tasks, and a cluster that was started for them. By force, the compilers of a worker would go on."""
        running = [task.ref for task in self.tasks.values()]
        with suppress(Exception):
            for ref in running:
                ray.cancel(ref)
            if running:
                ray.wait(running, num_returns=len(running), timeout=5)
        with suppress(Exception):
            ray.shutdown()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self.ended.put(line)
        self.ended.put(b"")

    def _start(self, task: _Task) -> None:
        job = task.job
        assert isinstance(job, CompileJob | CheckJob)
        task.tries += 1
        files = {}
        if isinstance(job, CheckJob):
            library = Path(job.library)
            files = {path.name: path.read_bytes() for path in (library, library.with_suffix(".json")) if path.exists()}
            job = msgspec.structs.replace(job, share=self.share)
        request = ray_node.Request(self.cluster.code, self.cluster.target, job, files)
        if job.ops not in self.sources:
            self.sources[job.ops] = ray.put(ray_node.pack(job.ops))
        verb = "check" if isinstance(job, CheckJob) else "compile"
        run = self.run.options(num_cpus=1, num_gpus=self.gpus, max_retries=0, name=f"fxc {verb} {job.label}")
        task.ref = run.remote(msgspec.msgpack.encode(request), self.sources[job.ops])
        task.ref.future().add_done_callback(lambda future: self.ended.put((job.id, future)))

    def _end(self, task: _Task, future: Future[bytes]) -> None:
        error = future.exception()
        if isinstance(error, LOST) and task.tries < TRIES:
            self.say(Note(f"{self._lost(task, error)}: it is started again"))
            self._start(task)
            return
        if isinstance(error, ConnectionError) and not isinstance(error, exceptions.RayTaskError):
            raise error
        if isinstance(error, LOST):
            self.say(Refusal(f"{self._lost(task, error)}, {TRIES} times", "look at the nodes' memory and logs"))
        elif error is not None:
            self.say(Refusal(f"a node of the Ray cluster cannot run fxc: {_line(error)}", SAME))
        else:
            answer = msgspec.msgpack.decode(future.result(), type=ray_node.Answer)
            if isinstance(answer, ray_node.Done):
                for name, data in answer.files.items():
                    (Path(task.job.directory) / name).write_bytes(data)
            self.say(_localized(answer, task.job))
        del self.tasks[task.job.id]

    def _lost(self, task: _Task, error: BaseException) -> str:
        assert not isinstance(task.job, ProbeJob)
        return f"the Ray cluster lost a worker at {task.job.label} ({type(error).__name__})"


def _require_reachable(address: str) -> None:
    """Where nobody listens Ray would try for ever.

    Raises:
        OSError: nobody does.
    """
    if found := _HOST.fullmatch(address):
        socket.create_connection((found[1], int(found[2])), timeout=30).close()


def _localized(answer: ray_node.Answer, job: Job) -> Reply | Refusal:
    """The answer of a node as one of a process of this machine."""
    if not isinstance(answer, ray_node.Done):
        return Refusal(answer.message, answer.hint)
    result = answer.reply.result
    if result is not None:
        result = {k: str(Path(job.directory) / v) if k in ray_node.FILES and v else v for k, v in result.items()}
    return msgspec.structs.replace(answer.reply, id=job.id, result=result)


def _line(error: BaseException) -> str:
    """What went wrong, of an error that Ray has wrapped in others and in traces of them."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1] if lines else 'no message'}"


def main() -> None:
    """Serve the build that has started this process."""
    replies = os.dup(1)
    os.dup2(2, 1)  # nothing that is imported may print into the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build decides

    def say(message: Message) -> None:
        data = msgspec.json.encode(message) + b"\n"
        while data:
            data = data[os.write(replies, data) :]

    cluster = msgspec.json.decode(sys.argv[1], type=Cluster)
    driver = Driver(cluster, say)
    try:
        try:
            driver.connect()
        except BuildError as error:
            traceback.print_exc()
            say(Refusal(error.message, error.hint))
            return
        driver.serve()
    except ConnectionError:  # of Ray's client; without it, Ray ends this process
        traceback.print_exc()
    except Exception as error:
        traceback.print_exc()
        say(Refusal(f"unexpected {_line(error)}", "this is a fault of fxc; -v shows where"))
    finally:
        driver.close()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
