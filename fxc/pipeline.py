"""Building: look up, plan, lower, publish. Imports torch only when something has to be built."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxc import choose, identity, machine
from fxc.cache import Cache
from fxc.errors import CacheIOError, CompileError, FxcError, SpecError, UsageError
from fxc.manifest import Manifest, PassReport, Proof, Unproved
from fxc.progress import Observer
from fxc.ranks import Ranks, ranks
from fxc.share import Shared
from fxc.spec import Spec, load_spec
from fxc.target import Target

if TYPE_CHECKING:
    from fxc.lower import Lowered
    from fxc.passes import Pass
    from fxc.plan import Plan


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


def build(
    path: str | Path, *, overrides: Iterable[str] = (), level: int | None = None, jobs: int | None = None,
    force: bool = False, prove: bool = True, rank: int | None = None, world_size: int | None = None,
    dp_rank: int | None = None, cache_dir: str | Path | None = None, remote: str | None = None,
    observer: Observer | None = None, passes: Sequence[Pass] = (),
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
        jobs: how many processes compile; the number of cores by default.
        force: compile even what is in the cache.
        prove: compare binaries with eager.
        rank: position in a distributed job; RANK and WORLD_SIZE by default.
        remote: where to look for an artifact before it is compiled; FXC_REMOTE by default.
        passes: graph passes that run after those of model.yaml. With some, the model is always traced.

    Raises:
        SpecError: something is wrong with model.yaml or with what it names.
        BuildError: the model cannot be traced, compiled, or proved.
        CacheIOError: the cache cannot be written.
    """
    start = time.perf_counter()
    observer = observer or Observer()
    spec, directory = load_spec(Path(path), overrides, level), Path(path).resolve().parent
    place = ranks(rank, world_size, dp_rank)
    cache = Cache.open(None if cache_dir is None else Path(cache_dir))
    count = jobs if jobs is not None else len(os.sched_getaffinity(0))
    if count < 1:
        raise UsageError(f"--jobs {count}: expected 1 or more")
    found = None if force or passes else identity.find(spec, directory, place, cache, compiler=True)
    if found is not None and (hit := _hit(cache, found, place, prove, {}, start)) is not None:
        return hit
    shared = None if force else Shared.open(remote, cache, observer)
    found = None if shared is None or passes else shared.take_spec(spec, directory, place, compiler=True)
    if found is not None and (hit := _hit(cache, found, place, prove, {}, start)) is not None:
        return hit
    try:
        with cache.building():
            return _miss(spec, directory, place, cache, count, force, prove, shared, observer, start, passes)
    except SpecError as error:  # found out while the model was looked up or constructed
        if str(path) in error.message:
            raise
        raise SpecError(f"{path}: {error.message}", error.hint) from error


def _miss(
    spec: Spec, directory: Path, place: Ranks, cache: Cache, jobs: int, force: bool, prove: bool, shared: Shared | None,
    observer: Observer, start: float, passes: Sequence[Pass],
) -> BuildResult:  # fmt: skip
    """Trace; then compile what the cache lacks, and publish."""
    from fxc.pool import Pool

    target = machine.probe(spec.device)
    if spec.compile.level:
        _require_tools(target)
    workers = Pool(jobs, directory) if spec.compile.level else contextlib.nullcontext()  # level 0 compiles nothing
    with workers as pool:  # imports the compiler while this process traces
        observer.phase("trace")
        from fxc.plan import make_plan

        with _TRACING:
            plan = make_plan(spec, directory, target, passes)
        observer.phase_done("trace", plan.seconds["trace"])
        observer.phase_done("partition", plan.seconds["partition"])
        manifest = plan.manifest
        factors = identity.direct_factors(spec, target, place)
        direct = identity.content_key(factors)
        hit = None if force else _hit(cache, manifest.hash, place, prove, plan.seconds, start)
        if hit is None and shared is not None and shared.take(manifest.hash):
            hit = _hit(cache, manifest.hash, place, prove, plan.seconds, start)
        if hit is not None:
            with contextlib.suppress(CacheIOError):  # a read-only cache
                if not passes:
                    identity.remember(cache, direct, manifest)
            return hit
        rehearsal = _rehearse(plan, spec.device) if prove else _rehearsed(cache, plan)
        lowered = _lower(plan, cache, pool, prove, force, observer)
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


def _lower(plan: Plan, cache: Cache, pool: Any, prove: bool, force: bool, observer: Observer) -> Lowered:
    from fxc.lower import Lowering

    observer.phase("compile")
    lowered = Lowering(cache, pool, observer, imports=plan.imports, prove=prove, force=force).run(plan.units)
    plan.seconds["compile"] = lowered.compile_seconds
    plan.seconds["prove"] = plan.seconds.get("prove", 0.0) + lowered.prove_seconds
    observer.phase_done("compile", plan.seconds["compile"])
    observer.phase_done("prove", plan.seconds["prove"])
    return lowered


def _hit(
    cache: Cache, hash: str, place: Ranks, prove: bool, seconds: dict[str, float], start: float
) -> BuildResult | None:
    """What is there already, if all of it is intact."""
    with cache.use(hash):
        if not identity.intact(cache, hash, place, prove):
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
    )
