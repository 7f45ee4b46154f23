"""What a build asks of its compile workers and hears from them: JSON, one message a line."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from fxc.records import Record
from fxc.target import Target


class UserOps(msgspec.Struct, frozen=True):
    """What registers the custom ops of a user."""

    imports: tuple[str, ...] = ()
    """Absolute paths of files, and dotted modules."""
    directory: str = ""
    """That of model.yaml, where those modules may lie."""
    sources: tuple[str, ...] = ()
    """Absolute paths of what was read when the model was traced, for a machine that has none of it."""


class CompileJob(msgspec.Struct, frozen=True, tag="compile"):
    """Compile a piece for a range or size."""

    id: int
    label: str
    """For people: `piece_1 num_tokens=8`."""
    text: str
    """`Piece.text`."""
    dims: dict[str, tuple[int, int, int]]
    """Dimension -> lowest, highest, hint."""
    target: Target
    options: dict[str, Any]
    """Inductor's configuration."""
    ops: UserOps
    directory: str
    """Where the library and everything temporary goes."""
    scratch: str
    """Lasting directory for the compiler's own caches."""
    fast: bool
    """Whether to make precompiled headers where there are none: worth it for more than a few binaries."""
    record: Record | None = None
    """The GPU to compile for, where that is not here."""


class TuneJob(CompileJob, frozen=True, tag="tune"):
    """Time the candidates of each kernel of a piece; what is compiled is thrown away."""


class RunJob(msgspec.Struct, frozen=True):
    """Run a piece that is compiled, at made-up inputs."""

    id: int
    label: str
    text: str
    """`Piece.text`."""
    device: str
    ops: UserOps
    points: tuple[dict[str, int], ...]
    """Sizes to run at."""
    lowest: dict[str, int]
    """Lowest sizes that the binary is for."""
    values: tuple[tuple[float, float] | None, ...]
    """Per input, the half-open range of made-up integers."""
    directory: str


class CheckJob(RunJob, frozen=True, tag="check"):
    """Load a compiled piece and run it against eager; without points, only load it."""

    library: str
    """Empty where it cannot be loaded, for want of the device: then `rewritten` runs in its place, as Python."""
    share: int
    """How many checks may run at once, which share the memory."""
    rewritten: str = ""
    """What passes made of `text`."""


class TimeJob(RunJob, frozen=True, tag="time"):
    """Time two binaries of one piece in turns."""

    fused: str
    """One library."""
    apart: str
    """The other one, without a fusion."""


class ProbeJob(msgspec.Struct, frozen=True, tag="probe"):
    """Say what the machine of a worker compiles for: the result is a `Target`."""

    id: int
    device: str
    directory: str


Job = CompileJob | TuneJob | CheckJob | TimeJob | ProbeJob


class Cluster(msgspec.Struct, frozen=True):
    """Where jobs go, and what must be true of every machine there."""

    address: str
    """For `ray.init`; empty for its own choice."""
    jobs: int | None
    target: Target
    code: str
    """`identity.own_code()`."""


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """How a job ended."""

    id: int
    seconds: float
    result: dict[str, Any] | None = None
    error: str = ""
    """The last line of what went wrong, empty when nothing did."""
    detail: str = ""
    """All of it: traceback and what the compiler printed."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Workers are there."""

    jobs: int
    """How many run at once."""


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Something went wrong, and the work goes on."""

    text: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Jobs cannot be done at all, whatever they are."""

    message: str
    hint: str = ""


Message = Reply | Ready | Note | Refusal


class Executor(Protocol):
    """Runs jobs somewhere, each in a process of its own."""

    @property
    def jobs(self) -> int:
        """How many may run at a time."""

    def send(self, job: Job) -> None:
        """Start a job; the caller keeps no more than `jobs` running."""

    def receive(self) -> Reply:
        """Wait for a job to end."""

    def close(self) -> None:
        """End all jobs and wait for the end."""
