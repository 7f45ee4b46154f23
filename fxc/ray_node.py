"""What a node of a Ray cluster does with a job: it sees that the node is what the build takes it for, and has the job
done as a build on this machine would have it done. Imports no torch: the process that compiles does.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from fxc import identity, machine
from fxc.cache import Cache
from fxc.errors import BuildError, FxcError
from fxc.jobs import CheckJob, CompileJob, ProbeJob, Reply, UserOps
from fxc.pool import Pool
from fxc.target import Target

FILES = ("library", "calls")
"""Results of a compile job that are files."""
HINT = "binaries are named by it: have all nodes of the cluster like the machine that builds"


class Head(msgspec.Struct, frozen=True):
    """What every version of fxc finds in a request."""

    code: str
    """`identity.own_code()` of the build."""


class Request(Head, frozen=True):
    """A job for another machine."""

    target: Target
    """What the build takes this machine for."""
    job: CompileJob | CheckJob
    files: dict[str, bytes]
    """What the job reads in its directory."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A job that was done, well or not."""

    reply: Reply
    files: dict[str, bytes]
    """By name; in the reply's result, names stand for their paths."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This node is no help."""

    message: str
    hint: str


Answer = Done | Refused


def pack(ops: UserOps) -> bytes:
    """The contents of a user's files, for `run`."""
    return msgspec.msgpack.encode({name: Path(name).read_bytes() for name in ops.sources if Path(name).is_file()})


def run(request: bytes, sources: bytes) -> bytes:
    """Do a job, in a fresh process and a temporary directory.

    Args:
        request: a `Request`, as MessagePack.
        sources: of `pack`.

    Returns:
        An `Answer`, as MessagePack.
    """
    try:
        code = msgspec.msgpack.decode(request, type=Head).code
        if code != identity.own_code():
            raise BuildError(_differs("fxc", identity.own_code(), code), HINT)
        answer: Answer = _run(msgspec.msgpack.decode(request, type=Request), sources)
    except FxcError as error:
        answer = Refused(f"Ray node {socket.gethostname()}: {error.message}", error.hint)
    return msgspec.msgpack.encode(answer)


def _run(request: Request, sources: bytes) -> Done:
    cache = Cache.open()
    compiler = _Compiler.get()
    with cache.staging() as stage:
        here = compiler.target(request.target.device, stage)
        require(request.target, machine.with_march(here, request.target.march or None))
        for name, data in request.files.items():
            (stage / name).write_bytes(data)
        for name, data in msgspec.msgpack.decode(sources, type=dict[str, bytes]).items():
            path = _inside(stage, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        reply = compiler.do(_moved(request.job, stage, cache))
        files = {}
        result: dict[str, Any] = dict(reply.result or {})
        for key in FILES:
            if made := result.get(key):
                result[key] = Path(made).name
                files[Path(made).name] = Path(made).read_bytes()
        return Done(msgspec.structs.replace(reply, result=result if reply.result is not None else None), files)


def require(wanted: Target, here: Target) -> None:
    """Refuse a node whose binaries would be others, under the same names.

    Raises:
        BuildError: names the first fact that differs, with both values.
    """
    for field in Target.__struct_fields__:
        if getattr(wanted, field) != getattr(here, field):
            raise BuildError(_differs(field, getattr(here, field), getattr(wanted, field)), HINT)


def _differs(what: str, here: Any, wanted: Any) -> str:
    return f"its {what} is {here or 'none'!r}, that of the machine that builds {wanted or 'none'!r}"


class _Compiler:
    """The process that forks one for each job. It is kept for the jobs that follow on the same GPU, as it takes seconds
    to import the compiler, and ends with this one."""

    running: ClassVar[dict[str | None, _Compiler]] = {}
    """By the GPUs that it sees."""

    def __init__(self) -> None:
        self.pool = Pool(1)
        self.targets: dict[str, Target] = {}

    @classmethod
    def get(cls) -> _Compiler:
        """The one for the GPU that Ray gives to this task."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible not in cls.running:
            cls.stop()
            cls.running[visible] = cls()
        return cls.running[visible]

    @classmethod
    def stop(cls) -> None:
        """End it, with what it does."""
        while cls.running:
            cls.running.popitem()[1].pool.close()

    def target(self, device: str, directory: Path) -> Target:
        """What this machine compiles for."""
        if device not in self.targets:
            reply = self.do(ProbeJob(0, device, str(directory)))
            if reply.result is None:
                raise BuildError(reply.error)
            self.targets[device] = msgspec.convert(reply.result, Target)
        return self.targets[device]

    def do(self, job: CompileJob | CheckJob | ProbeJob) -> Reply:
        """Do one job."""
        try:
            self.pool.send(job)
            while not self.pool.has_news(0.2):  # Ray ends a task by an interrupt, which no read would notice
                pass
            return self.pool.receive()
        except BaseException:
            self.stop()
            raise


def _moved(job: CompileJob | CheckJob, stage: Path, cache: Cache) -> CompileJob | CheckJob:
    """The job with this machine's paths."""
    imports = tuple(str(_inside(stage, name)) if name.endswith(".py") else name for name in job.ops.imports)
    directory = str(_inside(stage, job.ops.directory)) if job.ops.directory else ""
    ops = UserOps(imports, directory)
    if isinstance(job, CheckJob):
        library = str(stage / Path(job.library).name)
        return msgspec.structs.replace(job, ops=ops, directory=str(stage), library=library)
    return msgspec.structs.replace(job, ops=ops, directory=str(stage), scratch=str(cache.scratch("compiler")))


def _inside(stage: Path, path: str) -> Path:
    """Where a file of the machine that builds lies here: user's files find each other by their places."""
    return stage / "sources" / path.lstrip("/")
