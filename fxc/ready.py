"""Makes a machine ready to serve an artifact, and proves it: look up, check, load, and run one step per program."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxc import identity, machine, refs
from fxc.cache import Artifact, Cache, Trust
from fxc.errors import CacheMissError, RunError, UntrustedError
from fxc.manifest import Input, Manifest, Weight
from fxc.progress import Observer
from fxc.ranks import number, ranks
from fxc.shapes import Range, point_label, size_at
from fxc.share import Shared
from fxc.spec import load_spec

if TYPE_CHECKING:
    import torch

    from fxc.capture_plan import Recorded
    from fxc.runtime.program import Program


WAIT = 3600.0
"""Seconds; a build takes minutes, and one that dies lets go at once."""


class WarmResult(msgspec.Struct, frozen=True):
    """What `warm --json` prints."""

    hash: str
    hit: bool
    """It was in the cache."""
    built: bool
    """It was not, and this call built it."""
    ready: bool
    sizes: list[int | dict[str, int]]
    """Values of the dynamic dimension(s) that have a program of their own."""
    seconds: dict[str, float]
    """lookup, verify, load, first_step, capture, total. A build and the import of torch count to the total
    only."""
    graphs: dict[str, int]
    """CUDA graphs that could be captured, by mode."""
    graph_bytes: int
    """Memory of the GPU that they took."""
    not_captured: str
    """Why there are none, where model.yaml asks for some."""
    verified: bool
    """Whether the binaries were compared with eager on a device of their kind; `fxc verify --run` does so."""
    compilations: int
    """Processes that were started from the beginning of load to the end of the first steps. A program has no compiler;
    where an op that it calls compiles C++ or Triton at its first call, that starts one (g++, ptxas) or more."""


def warm(
    ref: str | Path, *, overrides: Iterable[str] = (), level: int | None = None, jobs: int | None = None,
    require_hit: bool = False, run: bool = True, rank: int | None = None, world_size: int | None = None,
    dp_rank: int | None = None, verify_key: Path | None = None, remote: str | None = None, wait: float = WAIT,
    require_verified: bool = False, cache_dir: Path | None = None, observer: Observer | None = None,
) -> WarmResult:  # fmt: skip
    """Look up (or build) what `ref` names, check the digests of this rank's files, load it, run one step per size and
    range, and on a GPU capture the CUDA graphs that model.yaml asks for, whose times and memory are noted in the cache.

    Args:
        ref: a model.yaml, a prefix of a hash, or the path of an artifact.
        require_hit: raise instead of building.
        run: False stops after loading.
        verify_key: a public key that it has to be signed with; what would be built here is not.
        remote: where to look for what is not in the cache; FXC_REMOTE by default.
        require_verified: raise where the binaries have not been compared with eager on a device of their kind.
        wait: seconds to wait for another process of this machine that is building the same, before building it too.

    Raises:
        CacheMissError: not in the cache, and `require_hit` or no model.yaml to build from.
        DamagedError: a file does not have its digest.
        UntrustedError: it is not verified, and `require_verified`.
        IncompatibleError: the artifact was built for another kind of machine.
    """
    clock = _Clock(observer or Observer())
    options: dict[str, Any] = {"overrides": tuple(overrides), "level": level}
    options |= {"rank": rank, "world_size": world_size, "dp_rank": dp_rank}
    trust = Trust.of(os.environ, verify_key)
    with clock.phase("lookup"):
        shared = Shared.open(remote, Cache.open(cache_dir), clock.observer, trust)
        artifact = look_up(ref, cache_dir, require_hit or bool(trust.keys), shared, trust=trust, **options)
    built = False
    if artifact is None:
        with _turn(ref, cache_dir, wait, clock.observer, options) as waited:
            artifact = look_up(ref, cache_dir, False, None, trust=trust, **options) if waited else None
            if built := artifact is None:
                artifact = _build(ref, cache_dir, clock.observer, jobs=jobs, remote=remote, **options)
    with artifact.use(), clock.phase("verify"):
        artifact.verify(artifact.rank_dir(number(rank, "RANK") or 0, dp_rank or 0))
    if require_verified and not artifact.manifest.verified:
        raise UntrustedError(
            f"artifact {artifact.manifest.hash} was built without a device of its kind and has not run on one",
            f"on such a machine: fxc verify {artifact.manifest.hash[:12]} --run",
        )
    # Imports torch, as a server has long done: seconds that count to the total only.
    from fxc.runtime import custom_ops, loader

    captured: list[Recorded] = []
    not_captured = ""
    with _started() as processes:
        with clock.phase("load"):
            if refs.is_spec(ref):  # a FILE.py that registers ops is named relative to model.yaml
                custom_ops.prepare(artifact.manifest.custom_ops, Path(ref).resolve().parent)
            program = loader.load(
                artifact.path, rank=rank, world_size=world_size, dp_rank=dp_rank, verify_key=verify_key
            )
        if run:
            with clock.phase("first_step"):
                _run_all(program, artifact.manifest)
            if program.device.type == "cuda":
                if refs.is_spec(ref):  # an artifact keeps the modes and sizes of the build that made it
                    program.cudagraph = load_spec(Path(ref), overrides, level).cudagraph
                with clock.phase("capture"):
                    captured, not_captured = _capture(program)
    return WarmResult(
        hash=artifact.manifest.hash, hit=not built, built=built, ready=True, sizes=artifact.manifest.sizes,
        seconds=clock.seconds(), graphs=dict(Counter(entry.mode for entry in captured)),
        graph_bytes=sum(entry.bytes for entry in captured), not_captured=not_captured,
        verified=artifact.manifest.verified, compilations=len(processes),
    )  # fmt: skip


def point_for(box: Range, taken: Sequence[Range]) -> dict[str, int] | None:
    """The lowest point of `box` that no size in `taken` serves; None where sizes cover all of it. 0 comes last."""
    if box.is_size:
        return box.low()
    axes = []
    for name, low, high in box.bounds:
        start = max(low, min(1, high))
        values = chain(range(start, high + 1), range(low, start))
        axes.append([(name, value) for value in islice(values, len(taken) + 1)])  # one of these is free, if any is
    return next((point for point in map(dict, product(*axes)) if not any(size.contains(point) for size in taken)), None)


def make_input(entry: Input, point: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
    """A random tensor for an input, on the generator's device, with entries in its half-open `values`."""
    import torch

    from fxc.random_inputs import draw

    shape = [size_at(part, point) for part in entry.shape]
    return draw(shape, getattr(torch, entry.dtype), entry.values, generator)


def make_weight(weight: Weight, generator: torch.Generator) -> torch.Tensor:
    """A random tensor for a weight, on the generator's device; zeros for integers, which may be indices of anything."""
    import torch

    shape = [int(part) for part in weight.shape]
    dtype: torch.dtype = getattr(torch, weight.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=generator.device)
    plain = dtype if dtype.is_complex or dtype.itemsize > 1 else torch.bfloat16  # float8 has no normal_
    made = torch.empty(shape, dtype=plain, device=generator.device).normal_(0, 0.02, generator=generator)
    return made.to(dtype)


def look_up(
    ref: str | Path, cache_dir: Path | None, require_hit: bool, shared: Shared | None, **options: Any
) -> Artifact | None:
    """What `ref` names, here or in the remote cache; None where it has to be built.

    Raises:
        CacheMissError: it is in neither, and `require_hit` or no model.yaml to build from.
    """
    try:
        return refs.find(ref, cache_dir, use=True, **options)
    except CacheMissError:
        if shared is not None and _take(ref, shared, options):
            return refs.find(ref, cache_dir, use=True, **options)
        if require_hit or not refs.is_spec(ref):
            raise
        return None


def _turn(
    ref: str | Path, cache_dir: Path | None, wait: float, observer: Observer, options: Mapping[str, Any]
) -> AbstractContextManager[bool]:
    """One build of the same model.yaml at a time on this machine. Says whether another one was waited for."""
    spec = load_spec(Path(ref), options["overrides"], options["level"])
    place = ranks(options["rank"], options["world_size"], options["dp_rank"])
    direct = identity.direct_key(spec, machine.probe(spec.device, compiler=False), place)
    words = f"another process is building {ref}: waiting for it, {wait:g} s at most"
    return Cache.open(cache_dir).turn(f"warm.{direct}", wait, lambda: observer.note(words))


def _take(ref: str | Path, shared: Shared, options: Mapping[str, Any]) -> bool:
    """Whether the remote cache had it."""
    if refs.is_spec(ref):
        spec = load_spec(Path(ref), options["overrides"], options["level"])
        place = ranks(options["rank"], options["world_size"], options["dp_rank"])
        return shared.take_spec(spec, Path(ref).resolve().parent, place) is not None
    return shared.take_prefix(str(ref))


def _build(ref: str | Path, cache_dir: Path | None, observer: Observer, **options: Any) -> Artifact:
    from fxc import pipeline

    result = pipeline.build(Path(ref), cache_dir=cache_dir, observer=observer, **options)
    return Cache.open(cache_dir).artifact(result.hash)


def _run_all(program: Program, manifest: Manifest) -> None:
    """One call per program, with random weights and inputs."""
    import torch

    generator = torch.Generator(program.device).manual_seed(0)
    program.bind({weight.name: make_weight(weight, generator) for weight in manifest.weights})
    served = [entry.range for entry in manifest.programs]
    for box in served:
        if (point := point_for(box, [other for other in served if other.free < box.free])) is not None:
            made = {entry.name: make_input(entry, point, generator) for entry in manifest.inputs}
            if bound := {entry.name: made.pop(entry.name) for entry in manifest.inputs if entry.bound}:
                program.bind_inputs(bound)
            try:
                program(**made)
            except (IndexError, RuntimeError, ValueError) as error:
                raise RunError(
                    f"the program fails on made-up inputs at {point_label(point)}: {str(error).partition(chr(10))[0]}",
                    "give the inputs `values: [low, high]` that it has answers to, or warm with --no-run",
                ) from error
    if program.device.type == "cuda":
        torch.cuda.synchronize(program.device)


def _capture(program: Program) -> tuple[list[Recorded], str]:
    """What was captured, or why nothing: a program that no graph can hold is ready without."""
    try:
        recorded = program.capture()
        return recorded, "; ".join(program.capture_failures.values())
    except RunError as error:
        return [], error.message


_STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"})
"""Audit events, one for each process that Python code starts. `os.exec` starts none: it is what a fork does then."""

_counting: list[list[str]] = []
_hooked: list[bool] = []


@contextmanager
def _started() -> Iterator[list[str]]:
    """The events of processes that start inside the block, in any thread."""
    if not _hooked:
        sys.addaudithook(_audit)  # cannot be taken away again
        _hooked.append(True)
    events: list[str] = []
    _counting.append(events)
    try:
        yield events
    finally:
        _counting[:] = [other for other in _counting if other is not events]


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _counting or event not in _STARTS:
        return
    if event == "os.posix_spawn" and sys._getframe(1).f_globals.get("__name__") == "subprocess":
        return  # by Popen, which has said so
    for events in _counting:
        events.append(event)


class _Clock:
    """Seconds per phase, told to the observer too."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._start = time.perf_counter()
        self._seconds = dict.fromkeys(("lookup", "verify", "load", "first_step", "capture"), 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.observer.phase(name)
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start
        self.observer.phase_done(name, self._seconds[name])

    def seconds(self) -> dict[str, float]:
        return {**self._seconds, "total": time.perf_counter() - self._start}
