"""`fxc tune`: times the candidates of each kernel of an artifact on this machine's GPU, into a tuning record."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from fxc import machine, tuning, verification
from fxc.cache import Artifact, Cache
from fxc.errors import DamagedError, IncompatibleError, UsageError
from fxc.inductor_options import options
from fxc.job_errors import failure
from fxc.jobs import Executor, TuneJob, UserOps
from fxc.lower import WORTH_HEADERS, Unit, unit
from fxc.manifest import Manifest
from fxc.pool import Pool
from fxc.progress import Observer
from fxc.region import Piece
from fxc.rewrite import TIMED, Found, passes
from fxc.target import Target
from fxc.tuning import Entry, Tuning


class Tuned(msgspec.Struct, frozen=True):
    """What `fxc tune --json` prints."""

    hash: str
    record: str
    """Path of the record's file; empty where no kernel was found and there is none."""
    device: str
    units: int
    """Compiled pieces whose kernels were timed."""
    kernels: dict[str, Entry]
    """Those that were timed now, by hash."""


def tune(artifact: Artifact, cache: Cache, directory: Path | None, observer: Observer) -> Tuned:
    """Time every kernel that Inductor writes for an artifact, one at a time, while no other does so on such a GPU, and
    add that to the cache's record, after each unit.

    Args:
        directory: of model.yaml, where files lie that register custom ops and passes.

    Raises:
        UsageError: the artifact is not for a GPU, or compiles nothing.
        IncompatibleError: it is not for this machine's GPU.
        DamagedError: a record of the cache, or a file of the artifact, is damaged.
        CompileError: a piece does not compile.
        CacheIOError: the record cannot be written.
    """
    target = artifact.manifest.target
    _require_here(artifact.manifest)
    tuning.stored(cache, target)  # that one is damaged is found out now, not when something was timed
    found = units(artifact, directory or Path.cwd())
    observer.phase("tune")
    observer.binaries(len(found), 0)
    path, record = cache.layout.tuning / tuning.file_name(target), tuning.empty(target)
    start, ops = time.perf_counter(), verification.user_ops(artifact, directory)
    with _alone(cache, target, observer), tempfile.TemporaryDirectory() as scratch, Pool(1) as pool:
        for one, kernels in _timed(found, ops, cache, pool, Path(scratch), observer):
            now = msgspec.structs.replace(tuning.empty(target), kernels=kernels)
            cache.update_tuning(path.name, partial(_updated, path, cache, target, one, now))
            record = record.merged(now)
    observer.phase_done("tune", time.perf_counter() - start)
    return Tuned(artifact.manifest.hash, str(path) if path.exists() else "", record.device, len(found), record.kernels)


@contextmanager
def _alone(cache: Cache, target: Target, observer: Observer) -> Iterator[None]:
    """While nobody else times kernels on such a GPU: each would measure the other."""
    name = tuning.lock_name(target)
    with ExitStack() as held:
        if not held.enter_context(cache.try_lock(name)):
            observer.note("waiting for another `fxc tune` on such a GPU")
            held.enter_context(cache.lock(name))
        yield


def _updated(path: Path, cache: Cache, target: Target, one: Unit, now: Tuning, data: bytes | None) -> bytes | None:
    """Text of the record, with what was timed now in place of all that it has of the unit."""
    record = tuning.empty(target) if data is None else tuning.of_cache(path, data, cache, target)
    record = record.without({one.scope}).merged(now)
    return None if data is None and not record.kernels else tuning.encode(record)


def _require_here(manifest: Manifest) -> None:
    """Refuse an artifact whose kernels cannot be timed here."""
    target, hash = manifest.target, manifest.hash
    if target.device != "cuda":
        raise UsageError(f"artifact {hash} is for device {target.device}: only kernels of GPUs are tuned")
    if not manifest.binaries:
        level = manifest.spec.compile.level
        raise UsageError(
            f"artifact {hash} has no binaries: {'all its ops run eagerly' if level else 'it is of level 0'}",
            "" if level else "-O2",
        )
    here = machine.here("cuda")
    machine.require_fit(target, here, machine.needs_of(manifest), machine.libraries())
    built, found = target.properties.get("name"), here.properties.get("name")
    if built != found:
        raise IncompatibleError(f"artifact {hash} is for {built}, and this GPU is {found}", "build it for this GPU")


def units(artifact: Artifact, directory: Path) -> list[Unit]:
    """What a build by rules compiles for the artifact's target, each once: passes run over its pieces again.

    Raises:
        DamagedError: the text of a piece is not what it was.
        UsageError: passes are not what they were.
    """
    manifest = artifact.manifest
    spec, target = manifest.spec, manifest.target
    checks, texts = verification.read(artifact)
    level = min(spec.compile.level, TIMED - 1)
    chosen, _ = passes(spec, directory, target)
    found = Found(chosen, target, level)
    was = next((factor.value for factor in manifest.factors if factor.name == "passes"), "")
    if was not in (found.identity, Found(chosen, target, spec.compile.level).identity):
        raise UsageError(f"passes are not what they were when artifact {manifest.hash} was built", "build it again")
    made: dict[str, Unit] = {}
    for program in manifest.programs:
        calls = [piece for piece in manifest.pieces[program.step] if piece.kind == "compiled"]
        for call, binary in zip(calls, program.binaries, strict=True):
            check = checks[binary]
            text = texts[check.piece].replace(f"def {check.piece}(", "def piece(", 1) + "\n"
            custom = ("",) if check.custom_ops else ()
            piece = Piece(text, call.dims, call.ops, custom, random=False, values=check.values)
            if piece.unique != call.unique:
                raise DamagedError(f"{check.piece} of artifact {manifest.hash} is not what was built", "build it again")
            plain = unit(piece, program.range, level, target, check.piece)
            by_rules = tuple(sorted(options(level, plain.range.is_size, target, clock=False).items()))
            one = found.rewritten(replace(plain, options=by_rules), check.piece, general=False)
            made.setdefault(one.scope, one)
    return list(made.values())


def _timed(
    units: Sequence[Unit], ops: UserOps, cache: Cache, pool: Executor, scratch: Path, observer: Observer
) -> Iterator[tuple[Unit, dict[str, Entry]]]:
    """Each unit with what was timed of it, by hash; nothing else runs meanwhile."""
    for number, one in enumerate(units):
        observer.compiling(one.label)
        place = scratch / str(number)
        place.mkdir()
        job = TuneJob(
            id=number, label=one.label, text=one.text or one.piece.text, dims=one.dims(), target=one.target,
            options=one.told(), ops=ops if one.piece.custom_ops else UserOps(), directory=str(place),
            scratch=str(cache.scratch("compiler")), fast=len(units) >= WORTH_HEADERS,
        )  # fmt: skip
        pool.send(job)
        reply = pool.receive()
        if reply.result is None:
            raise failure(one, reply, checking=False)
        observer.compiled(one.label, reply.seconds)
        kernels = {entry.pop("hash"): {**entry, "units": (one.scope,)} for entry in reply.result["kernels"]}
        yield one, msgspec.convert(kernels, dict[str, Entry])
