"""Building: look up, plan, lower, publish. Imports torch only when something has to be built."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxc import choose, executors, identity, machine, records, target_build
from fxc import tuning as tunings
from fxc.cache import Artifact, Cache
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
    target: str | Path | None = None, march: str | None = None, tuning: str | Path = "auto",
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
    order = Order(
        os.fspath(path), tuple(overrides), level, jobs, force, prove, rank, world_size, dp_rank,
        None if cache_dir is None else os.fspath(cache_dir), remote, march, os.fspath(tuning),
    )  # fmt: skip
    if target is None:
        return carry_out(order, observer or Observer(), passes=passes, executor=executor)
    if passes:
        raise UsageError("passes from Python do not reach a build for a target", "name them in passes.custom")
    if executor != executors.LOCAL:
        raise UsageError(f"--target and --executor {executor}: the nodes of a cluster have devices of their own")
    return target_build.build(records.find(os.fspath(target)), order, observer or Observer())


class Order(msgspec.Struct, frozen=True):
    """Arguments of `build` that reach a build in another process, too."""

    path: str
    overrides: tuple[str, ...] = ()
    level: int | None = None
    jobs: int | None = None
    force: bool = False
    prove: bool = True
    rank: int | None = None
    world_size: int | None = None
    dp_rank: int | None = None
    cache_dir: str | None = None
    remote: str | None = None
    march: str | None = None
    tuning: str = "auto"


def carry_out(
    order: Order, observer: Observer, *, record: Record | None = None, passes: Sequence[Pass] = (),
    executor: str = executors.LOCAL,
) -> BuildResult:  # fmt: skip
    """`build` in this process: for this machine, or for the record's GPU, which this process then believes to have."""
    start = time.perf_counter()
    spec = load_spec(Path(order.path), order.overrides, order.level)
    place = ranks(order.rank, order.world_size, order.dp_rank)
    cache = Cache.open(None if order.cache_dir is None else Path(order.cache_dir))
    if order.jobs is not None and order.jobs < 1:
        raise UsageError(f"--jobs {order.jobs}: expected 1 or more")
    executors.check(executor)
    if executor != executors.LOCAL and spec.compile.level == 3:
        raise UsageError(f"executor {executor}: level 3 times fusions on the machine that builds", "-O2")
    goal = Goal.of(spec, record, order.march, order.tuning, cache)
    launch = partial(executors.start, executor, order.jobs, cache, observer)
    return _Build(order, spec, place, cache, goal, passes, observer, launch, start).run()


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


_Rehearsal = tuple[Sequence[Proof], Sequence[Unproved]]


@dataclass
class _Build:
    """One build, from its order to its result."""

    order: Order
    spec: Spec
    place: Ranks
    cache: Cache
    goal: Goal
    passes: Sequence[Pass]
    """From Python: an artifact with some is not found by its spec, nor is it noted what the spec stands for."""
    observer: Observer
    launch: Callable[[Target], Pool]
    start: float
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return Path(self.order.path).resolve().parent

    def run(self) -> BuildResult:
        """Find the artifact here, then in the remote cache; trace and compile on a miss."""
        where: dict[str, Any] = {"compiler": True, "target": self.goal.target, "tuning": self.goal.tuned}
        known = not self.order.force and not self.passes
        found = identity.find(self.spec, self.directory, self.place, self.cache, **where) if known else None
        if found is not None and (hit := self._hit(found)) is not None:
            return hit
        shared = None if self.order.force else Shared.open(self.order.remote, self.cache, self.observer)
        found = None
        if shared is not None and known:
            found = shared.take_spec(self.spec, self.directory, self.place, **where)
        if found is not None and (hit := self._hit(found)) is not None:
            return hit
        try:
            with self.cache.building():
                return self._miss(shared)
        except SpecError as error:  # found out while the model was looked up or constructed
            if self.order.path in error.message:
                raise
            raise SpecError(f"{self.order.path}: {error.message}", error.hint) from error

    def _hit(self, hash: str) -> BuildResult | None:
        """What is there already, if all of it is intact."""
        verified = self.goal.record is None
        with self.cache.use(hash):
            if not identity.intact(self.cache, hash, self.place, self.order.prove, verified=verified):
                return None
            artifact = self.cache.artifact(hash)
            self.cache.touch(hash)
            if not self.passes:
                self._prefer(artifact.manifest)
            return self._result(artifact, True, {"compiled": 0, "reused": len(artifact.manifest.binaries)})

    def _prefer(self, manifest: Manifest) -> None:
        """Have model.yaml mean for loads what this build gave, and not the same with another tuning record."""
        sources = identity.index_sources(manifest)
        with contextlib.suppress(CacheIOError):  # a read-only cache
            self.cache.prefer(identity.direct_key(self.spec, self.goal.target, self.place), manifest.hash, sources)

    def _miss(self, shared: Shared | None) -> BuildResult:
        """Trace; then compile what the cache lacks, and publish."""
        target, compiles = self.goal.target, bool(self.spec.compile.level)
        if compiles:
            _require_tools(target)
        with self.launch(target) if compiles else contextlib.nullcontext() as pool:  # imports the compiler meanwhile
            plan = self._plan()
            factors = identity.direct_factors(self.spec, target, self.place)
            direct = identity.content_key(factors)
            if (hit := self._traced_hit(plan.manifest.hash, shared)) is not None:
                with contextlib.suppress(CacheIOError):  # a read-only cache
                    if not self.passes:
                        identity.remember(self.cache, direct, plan.manifest)
                return hit
            rehearsal = self._rehearse(plan) if self.order.prove else _rehearsed(self.cache, plan)
            lowered = self._lower(plan, pool)
        self.observer.phase("publish")
        at = time.perf_counter()
        manifest = _manifest(plan, lowered, rehearsal, {**self.seconds, "total": at - self.start})
        artifact = self.cache.publish(
            manifest, self.place.directory, plan.files, lowered.binaries, world_size=self.place.world_size,
            direct=() if self.passes else factors,
        )  # fmt: skip
        if not self.passes:
            identity.remember(self.cache, direct, manifest)
        self.seconds["publish"] = time.perf_counter() - at
        self.observer.phase_done("publish", self.seconds["publish"])
        return self._result(artifact, False, {"compiled": lowered.compiled, "reused": lowered.reused})

    def _plan(self) -> Plan:
        self.observer.phase("trace")
        from fxc.plan import make_plan

        with _TRACING:
            if self.goal.record is not None:
                from fxc import virtual

                virtual.activate(self.goal.record)
            plan = make_plan(
                self.spec, self.directory, self.goal.target, self.passes, self.goal.record, self.goal.tuning
            )
        self.seconds.update(plan.seconds)
        for phase in ("trace", "partition"):
            self.observer.phase_done(phase, self.seconds[phase])
        return plan

    def _traced_hit(self, hash: str, shared: Shared | None) -> BuildResult | None:
        """What is there already under the name that only a trace tells."""
        hit = None if self.order.force else self._hit(hash)
        if hit is None and shared is not None and shared.take(hash):
            hit = self._hit(hash)
        return hit

    def _rehearse(self, plan: Plan) -> _Rehearsal:
        from fxc.rehearse import rehearse

        at = time.perf_counter()
        device = self.spec.device if self.goal.record is None else "cpu"
        found = rehearse(plan.parts, plan.inputs, plan.weights, device)
        self.seconds["prove"] = time.perf_counter() - at
        return found

    def _lower(self, plan: Plan, pool: Any) -> Lowered:
        from fxc.lower import Lowering

        self.observer.phase("compile")
        lowered = Lowering(
            self.cache, pool, self.observer, ops=plan.ops, prove=self.order.prove, force=self.order.force,
            record=self.goal.record,
        ).run(plan.units)  # fmt: skip
        self.seconds["compile"] = lowered.compile_seconds
        self.seconds["prove"] = self.seconds.get("prove", 0.0) + lowered.prove_seconds
        for phase in ("compile", "prove"):
            self.observer.phase_done(phase, self.seconds[phase])
        return lowered

    def _result(self, artifact: Artifact, hit: bool, binaries: dict[str, int]) -> BuildResult:
        manifest = artifact.manifest
        phases = dict.fromkeys(("trace", "partition", "compile", "prove", "publish"), 0.0) | self.seconds
        pieces = [piece for step in manifest.pieces.values() for piece in step]
        return BuildResult(
            hash=manifest.hash,
            path=str(artifact.path),
            hit=hit,
            pieces=len(pieces),
            unique_pieces=len({piece.unique for piece in pieces if piece.kind == "compiled"}),
            binaries=binaries,
            sizes=manifest.sizes,
            seconds={**phases, "total": time.perf_counter() - self.start},
            proof=[ProofLine(line.piece, line.shape, line.max_rel_err) for line in manifest.proof],
            proved=manifest.proved,
            unproved=list(manifest.unproved),
            passes=list(manifest.passes),
            verified=manifest.verified,
        )


def _manifest(plan: Plan, lowered: Lowered, rehearsal: _Rehearsal | None, seconds: dict[str, float]) -> Manifest:
    """The plan's, with what became of its units."""
    made = [lowered.binaries[name] for name in sorted(lowered.binaries)]
    proof, unproved = rehearsal or ((), ())
    manifest = plan.manifest
    return msgspec.structs.replace(
        manifest, binaries=lowered.binaries, passes=choose.report(manifest.passes, manifest.pieces, made),
        proof=(*proof, *(line for binary in made for line in binary.proof)),
        unproved=(*unproved, *(line for binary in made for line in binary.unproved)),
        proved=rehearsal is not None and all(binary.checked for binary in made),
        created=datetime.now(UTC).isoformat(timespec="seconds"), seconds=seconds,
    )  # fmt: skip


def _require_tools(target: Target) -> None:
    """Say before tracing what every compile would fail for."""
    hint = "apt install g++, or set CXX; `fxc doctor` tells more"
    if not target.compiler:
        named = os.environ.get("CXX")
        what = f"CXX is {named!r}, which does not run" if named else "g++ is not on PATH"
        raise CompileError(f"there is no C++ compiler: {what}", hint)
    if shutil.which("strip") is None:
        raise CompileError("there is no `strip` on PATH, which binaries are made small with", "apt install binutils")


def _rehearsed(cache: Cache, plan: Plan) -> _Rehearsal | None:
    """What an earlier build of the same artifact, for another rank say, has found."""
    try:
        earlier = cache.artifact(plan.manifest.hash).manifest
    except FxcError:
        return None
    proof = [line for line in earlier.proof if line.piece in plan.parts]
    unproved = [line for line in earlier.unproved if line.piece in plan.parts]
    return (proof, unproved) if proof or unproved else None
