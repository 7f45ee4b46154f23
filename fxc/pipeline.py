"""Building: look up, plan, lower, publish. Imports torch only when something has to be built."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxc import choose, executors, identity, machine, records, target_build
from fxc import tuning as tunings
from fxc.cache import Cache
from fxc.errors import CacheIOError, CompileError, FxcError, SpecError, UsageError
from fxc.manifest import Manifest, PassReport, Proof, Unproved
from fxc.progress import Observer
from fxc.ranks import Ranks, ranks
from fxc.records import Record
from fxc.share import Shared
from fxc.spec import Spec, load_spec
from fxc.target import Target
from fxc.tuning import Tuning

if TYPE_CHECKING:
    from fxc.lower import Lowered
    from fxc.passes import Pass
    from fxc.plan import Plan
    from fxc.pool import Pool


_TRACING = threading.Lock()
"""torch traces in one thread of a process at a time."""


class ProofLine(msgspec.Struct, frozen=True):
    """A piece that was compared with eager."""

    piece: str
    shape: str
    max_rel_err: float


class BuildResult(msgspec.Struct, frozen=True):
    """What `fxc build --json` prints."""

    hash: str
    path: str
    hit: bool
    """The artifact was in the cache."""
    pieces: int
    """Pieces between cuts and splitting ops, over all graphs."""
    unique_pieces: int
    """Different compiled ones among them."""
    binaries: dict[str, int]
    """`compiled` by this build, `reused` from the cache."""
    sizes: list[int | dict[str, int]]
    seconds: dict[str, float]
    """trace, partition, compile, prove, publish, total."""
    proof: list[ProofLine]
    proved: bool
    """Whether everything was run against eager, by this build or an earlier one."""
    unproved: list[Unproved]
    """Points where nothing could be compared, with the reason."""
    passes: list[PassReport]
    verified: bool = True
    """Whether the binaries have run on a device of their kind."""


def build(
    path: str | Path, *, overrides: Iterable[str] = (), level: int | None = None, jobs: int | None = None,
    force: bool = False, prove: bool = True, rank: int | None = None, world_size: int | None = None,
    dp_rank: int | None = None, cache_dir: str | Path | None = None, remote: str | None = None,
    executor: str = executors.LOCAL, observer: Observer | None = None, passes: Sequence[Pass] = (),
    target: str | None = None, march: str | None = None, tuning: str = "auto",
) -> BuildResult:  # fmt: skip
    """Make the artifact for a model.yaml, or find it.

    While it traces, one thread at a time, the whole process is affected: log messages up to ERROR are dropped,
    sys.stderr goes to a buffer (a note of the error, where tracing ends with one), warnings are off while the model is
    constructed, its folder is first on sys.path while its code is imported, reads of os.environ and opened files are
    noted, and torch's random numbers begin at one seed. All of that is put back; what stays is an idle audit hook, and
    the model's modules in sys.modules.

    Args:
        overrides: `KEY=VALUE` with dotted keys, over the file's.
        level: over the file's `compile.level`.
        jobs: how many processes compile; the number of cores by default, of the cluster with another executor.
        force: compile even what is in the cache.
        prove: compare binaries with eager.
        rank: position in a distributed job; RANK and WORLD_SIZE by default.
        remote: where to look for an artifact before it is compiled; FXC_REMOTE by default.
        executor: where it is compiled: `local`, `ray`, `ray:auto`, `ray:HOST:PORT`, `ray://HOST:PORT`.
        passes: graph passes that run after those of model.yaml. With some, the model is always traced.
        target: a GPU that need not be here: name of a shipped record, or the file of one. In a child process.
        march: level of x86-64 that host code around a GPU is for; `x86-64-v3` by default.
        tuning: the file of a tuning record; `none`; or `auto`, the cache's own for that GPU, where it has one.

    Raises:
        SpecError: something is wrong with model.yaml or with what it names.
        BuildError: the model cannot be traced, compiled, or proved.
        CacheIOError: the cache cannot be written.
    """
    observer = observer or Observer()
    if target is not None:
        if passes:
            raise UsageError("passes from Python do not reach a build for a target", "name them in passes.custom")
        if executor != executors.LOCAL:
            raise UsageError(f"--target and --executor {executor}: the nodes of a cluster have devices of their own")
        options = {
            "overrides": tuple(overrides), "level": level, "jobs": jobs, "force": force, "prove": prove, "rank": rank,
            "world_size": world_size, "dp_rank": dp_rank, "cache_dir": cache_dir and str(cache_dir), "remote": remote,
            "tuning": tuning,
        }  # fmt: skip
        return target_build.build(records.find(target), str(path), march, options, observer)
    return build_for(
        None, path, overrides=overrides, level=level, jobs=jobs, force=force, prove=prove, rank=rank,
        world_size=world_size, dp_rank=dp_rank, cache_dir=cache_dir, remote=remote, observer=observer, passes=passes,
        march=march, executor=executor, tuning=tuning,
    )  # fmt: skip


def build_for(
    record: Record | None, path: str | Path, *, overrides: Iterable[str] = (), level: int | None = None,
    jobs: int | None = None, force: bool = False, prove: bool = True, rank: int | None = None,
    world_size: int | None = None, dp_rank: int | None = None, cache_dir: str | Path | None = None,
    remote: str | None = None, observer: Observer, passes: Sequence[Pass] = (), march: str | None = None,
    executor: str = executors.LOCAL, tuning: str = "auto",
) -> BuildResult:  # fmt: skip
    """`build` in this process: for this machine, or for the record's GPU, which this process then believes to have."""
    start = time.perf_counter()
    spec, directory = load_spec(Path(path), overrides, level), Path(path).resolve().parent
    place = ranks(rank, world_size, dp_rank)
    cache = Cache.open(None if cache_dir is None else Path(cache_dir))
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: expected 1 or more")
    executors.check(executor)
    if executor != executors.LOCAL and spec.compile.level == 3:
        raise UsageError(f"executor {executor}: level 3 times fusions on the machine that builds", "-O2")
    launch = partial(executors.start, executor, jobs, cache, observer)
    goal = Goal.of(spec, record, march, tuning, cache)
    find = partial(identity.find, spec, directory, place, cache, compiler=True, target=goal.target, tuning=goal.tuned)
    found = None if force or passes else find()
    if found is not None and (hit := _hit(cache, found, place, prove, {}, start, goal)) is not None:
        return hit
    shared = None if force else Shared.open(remote, cache, observer)
    found = None
    if shared is not None and not passes:
        found = shared.take_spec(spec, directory, place, compiler=True, target=goal.target, tuning=goal.tuned)
    if found is not None and (hit := _hit(cache, found, place, prove, {}, start, goal)) is not None:
        return hit
    try:
        with cache.building():
            return _miss(spec, directory, place, cache, launch, force, prove, shared, observer, start, passes, goal)
    except SpecError as error:  # found out while the model was looked up or constructed
        if str(path) in error.message:
            raise
        raise SpecError(f"{path}: {error.message}", error.hint) from error


class Goal(msgspec.Struct, frozen=True):
    """What a build is for."""

    target: Target
    record: Record | None = None
    """The GPU, where that is not here."""
    tuning: Tuning | None = None
    tuned: str | None = None
    """Digest of the tuning record that an artifact must have been built with; None where any will do."""

    @classmethod
    def of(cls, spec: Spec, record: Record | None, march: str | None, tuning: str, cache: Cache) -> Goal:
        """
        Raises:
            UsageError: the spec is not for a GPU, `march` is no level, or `tuning` names no record for the GPU.
        """
        if record is not None and spec.device != "cuda":
            raise UsageError(f"--target {record.name}: the model is for device {spec.device}", "--set device=cuda")
        found = machine.probe(spec.device) if record is None else records.target(record)
        return cls(machine.with_march(found, march), record, *tunings.find(tuning, cache, found))


def _miss(
    spec: Spec, directory: Path, place: Ranks, cache: Cache, launch: Callable[[Target], Pool], force: bool, prove: bool,
    shared: Shared | None, observer: Observer, start: float, passes: Sequence[Pass], goal: Goal,
) -> BuildResult:  # fmt: skip
    """Trace; then compile what the cache lacks, and publish."""
    target, record = goal.target, goal.record
    if spec.compile.level:
        _require_tools(target)
    workers = launch(target) if spec.compile.level else contextlib.nullcontext()  # level 0 compiles nothing
    with workers as pool:  # imports the compiler while this process traces
        observer.phase("trace")
        from fxc.plan import make_plan

        with _TRACING:
            if record is not None:
                from fxc import virtual

                virtual.activate(record)
            plan = make_plan(spec, directory, target, passes, record, goal.tuning)
        observer.phase_done("trace", plan.seconds["trace"])
        observer.phase_done("partition", plan.seconds["partition"])
        manifest = plan.manifest
        factors = identity.direct_factors(spec, target, place)
        direct = identity.content_key(factors)
        hit = None if force else _hit(cache, manifest.hash, place, prove, plan.seconds, start, goal)
        if hit is None and shared is not None and shared.take(manifest.hash):
            hit = _hit(cache, manifest.hash, place, prove, plan.seconds, start, goal)
        if hit is not None:
            with contextlib.suppress(CacheIOError):  # a read-only cache
                if not passes:
                    identity.remember(cache, direct, manifest)
            return hit
        rehearsal = _rehearse(plan, "cpu" if record else spec.device) if prove else _rehearsed(cache, plan)
        lowered = _lower(plan, cache, pool, prove, force, observer, record)
    observer.phase("publish")
    at = time.perf_counter()
    made = [lowered.binaries[name] for name in sorted(lowered.binaries)]
    proof, unproved = rehearsal or ((), ())
    manifest = msgspec.structs.replace(
        manifest, binaries=lowered.binaries, passes=choose.report(manifest.passes, manifest.pieces, made),
        proof=(*proof, *(line for binary in made for line in binary.proof)),
        unproved=(*unproved, *(line for binary in made for line in binary.unproved)),
        proved=rehearsal is not None and all(binary.checked for binary in made),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds={**plan.seconds, "total": time.perf_counter() - start},
    )  # fmt: skip
    cache.publish(
        manifest, place.directory, plan.files, lowered.binaries, world_size=place.world_size,
        direct=() if passes else factors,
    )  # fmt: skip
    if not passes:
        identity.remember(cache, direct, manifest)
    plan.seconds["publish"] = time.perf_counter() - at
    observer.phase_done("publish", plan.seconds["publish"])
    return _result(
        cache, manifest, False, {"compiled": lowered.compiled, "reused": lowered.reused}, plan.seconds, start
    )


def _require_tools(target: Target) -> None:
    """Say before tracing what every compile would fail for."""
    hint = "apt install g++, or set CXX; `fxc doctor` tells more"
    if not target.compiler:
        named = os.environ.get("CXX")
        what = f"CXX is {named!r}, which does not run" if named else "g++ is not on PATH"
        raise CompileError(f"there is no C++ compiler: {what}", hint)
    if shutil.which("strip") is None:
        raise CompileError("there is no `strip` on PATH, which binaries are made small with", "apt install binutils")


_Rehearsal = tuple[Sequence[Proof], Sequence[Unproved]]


def _rehearsed(cache: Cache, plan: Plan) -> _Rehearsal | None:
    """What an earlier build of the same artifact, for another rank say, has found."""
    try:
        earlier = cache.artifact(plan.manifest.hash).manifest
    except FxcError:
        return None
    proof = [line for line in earlier.proof if line.piece in plan.parts]
    unproved = [line for line in earlier.unproved if line.piece in plan.parts]
    return (proof, unproved) if proof or unproved else None


def _rehearse(plan: Plan, device: str) -> _Rehearsal:
    from fxc.rehearse import rehearse

    at = time.perf_counter()
    found = rehearse(plan.parts, plan.inputs, plan.weights, device)
    plan.seconds["prove"] = time.perf_counter() - at
    return found


def _lower(
    plan: Plan, cache: Cache, pool: Any, prove: bool, force: bool, observer: Observer, record: Record | None
) -> Lowered:
    from fxc.lower import Lowering

    observer.phase("compile")
    lowering = Lowering(cache, pool, observer, ops=plan.ops, prove=prove, force=force, record=record)
    lowered = lowering.run(plan.units)
    plan.seconds["compile"] = lowered.compile_seconds
    plan.seconds["prove"] = plan.seconds.get("prove", 0.0) + lowered.prove_seconds
    observer.phase_done("compile", plan.seconds["compile"])
    observer.phase_done("prove", plan.seconds["prove"])
    return lowered


def _hit(
    cache: Cache, hash: str, place: Ranks, prove: bool, seconds: dict[str, float], start: float, goal: Goal
) -> BuildResult | None:
    """What is there already, if all of it is intact."""
    with cache.use(hash):
        if not identity.intact(cache, hash, place, prove, verified=goal.record is None):
            return None
        manifest = cache.artifact(hash).manifest
        cache.touch(hash)
        return _result(cache, manifest, True, {"compiled": 0, "reused": len(manifest.binaries)}, seconds, start)


def _result(
    cache: Cache, manifest: Manifest, hit: bool, binaries: dict[str, int], seconds: dict[str, float], start: float
) -> BuildResult:
    phases = dict.fromkeys(("trace", "partition", "compile", "prove", "publish"), 0.0) | seconds
    pieces = [piece for step in manifest.pieces.values() for piece in step]
    return BuildResult(
        hash=manifest.hash,
        path=str(cache.artifact(manifest.hash).path),
        hit=hit,
        pieces=len(pieces),
        unique_pieces=len({piece.unique for piece in pieces if piece.kind == "compiled"}),
        binaries=binaries,
        sizes=manifest.sizes,
        seconds={**phases, "total": time.perf_counter() - start},
        proof=[ProofLine(line.piece, line.shape, line.max_rel_err) for line in manifest.proof],
        proved=manifest.proved,
        unproved=list(manifest.unproved),
        passes=list(manifest.passes),
        verified=manifest.verified,
    )
