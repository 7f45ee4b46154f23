"""A unique piece and a range to a binary: what the key holds, what the compiler is told, and the jobs that do it."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fxc import machine
from fxc.cache import Cache, key
from fxc.choose import Race
from fxc.inductor_options import options
from fxc.job_errors import failure
from fxc.jobs import CheckJob, CompileJob, Executor, Reply, TimeJob, UserOps
from fxc.manifest import Binary, Kernel, Proof, Unproved
from fxc.progress import Observer
from fxc.records import Record
from fxc.region import Piece
from fxc.shapes import Range, edge_points, small_point
from fxc.target import Target
from fxc.try_out import try_out

MODULES = (
    "_torch_build", "_torch_run", "_worker", "choose", "convert", "cubin", "cuda_sdk", "expand", "graph_run",
    "graph_text", "host_compiler", "inductor_options", "job_errors", "jobs", "kernel_choice", "kernels", "lower",
    "machine", "piece_jobs", "pool", "prove", "random_inputs", "records", "scalars", "shapes", "target", "timing",
    "try_out", "virtual",
)  # fmt: skip
"""What decides a binary, whether it is accepted, and what its proof says, given the piece's text."""
_HERE = Path(__file__).parent
KERNELS = key.digest(b"".join(path.read_bytes() for path in sorted((_HERE / "ops").glob("*.py"))))
"""Digest of the ops whose Triton kernels become part of binaries."""
VERSION = key.digest(b"".join((_HERE / f"{name}.py").read_bytes() for name in MODULES))
"""Digest of the code that makes and checks binaries: another one may make others of the same piece."""

WORTH_HEADERS = 3
"""Binaries from which on making precompiled headers saves more than it takes."""

_HINTS = (1021, 509, 251, 127, 61, 31, 17, 13, 11, 7, 5, 3)
"""Primes: an example size that no width of a model is a multiple of."""


@dataclass(frozen=True)
class Unit:
    """A piece at a range or size: what one binary is made of."""

    piece: Piece
    range: Range
    """Of the dimensions that the piece mentions."""
    options: tuple[tuple[str, Any], ...]
    target: Target
    label: str
    """For people: `piece_1 num_tokens=8`."""
    text: str = ""
    """What passes made of the piece's text; empty where they found nothing."""
    passes: str = ""
    """Identity of the passes that did."""
    changed_by: tuple[str, ...] = ()
    """Their names."""
    record: str = ""
    """Digest of what is told of the device, where that is not here."""
    tuning: str = ""
    """What it takes of a tuning record, JSON of configurations by kernel; empty where that is nothing."""

    fusions: tuple[str, ...] = ()
    """Names of those passes that have to be faster than the graph without them."""
    forms: tuple[tuple[frozenset[str], Unit], ...] = ()
    """What the unit is without some of them, for each choice; this one has them all."""

    def form(self, left_out: frozenset[str]) -> Unit:
        """The unit that is compiled without some fusions, and without a choice."""
        return dict(self.forms)[left_out] if left_out else replace(self, fusions=(), forms=())

    @property
    def factors(self) -> list[tuple[str, str]]:
        """Everything that decides what the binary computes and how fast, by name, in order."""
        return [
            ("lower", VERSION),
            ("piece", self.piece.text),
            ("passes", self.passes),
            ("rewritten", self.text),
            ("ops", "\n".join(self.piece.custom_ops)),
            ("kernels", KERNELS if self._has_kernels else ""),
            ("range", self.range.label),
            ("hints", repr(sorted(self.dims().items()))),
            ("options", repr(sorted(self.options))),
            ("forms", " ".join(form.key for _, form in self.forms)),
            ("target", msgspec.json.encode(self.target).decode()),
            ("record", self.record),
            ("tuning", self.tuning),
        ]

    @property
    def key(self) -> str:
        """Digest of the factors."""
        return key.combine(self.factors)

    @property
    def scope(self) -> str:
        """Digest of what is compiled, whatever for: by it an entry of a tuning record names its units."""
        return key.combine([("text", self.text or self.piece.text), ("hints", repr(sorted(self.dims().items())))])

    @property
    def _has_kernels(self) -> bool:
        custom = self.target.device == "cuda" and bool(self.piece.custom_ops)
        return custom or calls_own(self.piece) or "torch.ops.fxc." in self.text

    def told(self) -> dict[str, Any]:
        """Inductor's configuration, with what it takes of a tuning record."""
        tuned = {"autotune_lookup_table": msgspec.json.decode(self.tuning)} if self.tuning else {}
        return dict(self.options) | tuned

    def dims(self) -> dict[str, tuple[int, int, int]]:
        """Per dimension: lowest, highest, hint."""
        return {name: (low, high, hint(low, high)) for name, low, high in self.range.bounds}

    def points(self) -> tuple[dict[str, int], ...]:
        """Where the binary is compared with eager."""
        middle = {name: hint for name, (_, _, hint) in self.dims().items()}
        return edge_points(self.range, [middle])


def calls_own(piece: Piece) -> bool:
    """Whether what fxc's own ops do becomes part of the binary."""
    return any(schema.startswith("fxc::") for schema in piece.custom_ops)


def hint(low: int, high: int) -> int:
    """The example size the compiler tunes for: a prime of the range's upper part, 1021 at most."""
    return next((prime for prime in _HINTS if low < prime < high), high)


def unit(piece: Piece, box: Range, level: int, target: Target, name: str, record: Record | None = None) -> Unit:
    """The unit for a piece in a program for `box`, before passes. `record`: the GPU, where that is not here."""
    own = Range(tuple(bound for bound in box.bounds if bound[0] in piece.dims))
    chosen = options(level, own.is_size, target, clock=record is None)
    told = "" if record is None else key.digest(msgspec.json.encode(record.properties, order="deterministic"))
    return Unit(piece, own, tuple(sorted(chosen.items())), target, f"{name} {own.label}", record=told)


@dataclass
class Lowered:
    """What became of all units."""

    binaries: dict[str, Binary] = field(default_factory=dict)
    compiled: int = 0
    reused: int = 0
    compile_seconds: float = 0.0
    """Wall time; where compiling and proving go on at once, each has the share that its jobs have of those running."""
    prove_seconds: float = 0.0


@dataclass
class _Running:
    """A unit being compiled, then checked, and the lock on it."""

    unit: Unit
    directory: Path
    lock: ExitStack
    compile_seconds: float = 0.0
    compiled: dict[str, Any] = field(default_factory=dict)


class Lowering:
    """Compiles and checks units, those that are in the cache excepted."""

    def __init__(
        self, cache: Cache, pool: Executor, observer: Observer, *, ops: UserOps, prove: bool, force: bool,
        record: Record | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            ops: what registers custom ops.
            prove: whether to compare binaries with eager; each is loaded once in any case.
            force: whether to compile what is in the cache already.
            record: the GPU to compile for, where that is not here.
        """
        self.cache = cache
        self.pool = pool
        self.observer = observer
        self.ops = ops
        self.prove = prove
        self.force = force
        self.record = record
        self.done = Lowered()
        self._ids = itertools.count()

    def run(self, units: Iterable[Unit]) -> Lowered:
        """Make every binary.

        Raises:
            CompileError: names the piece and the shape, with the compiler's own message.
            ProofError: a binary does not equal eager.
        """
        wanted = {unit.key: unit for unit in units}
        races = [Race(unit) for unit in wanted.values() if unit.forms and not self._take(unit)]
        self._make({key: unit for key, unit in wanted.items() if not unit.forms or key in self.done.binaries})
        with ExitStack() as locks:
            for race in sorted(races, key=lambda race: race.unit.key):  # in one order: several builds may want them
                locks.enter_context(self.cache.lock(race.unit.key))
            left = [race for race in races if not self._take(race.unit)]
            self.done.reused += len(races) - len(left)
            self._choose(left)
        self.done.binaries = {key: self.done.binaries[key] for key in wanted}
        return self.done

    def _make(self, wanted: Mapping[str, Unit]) -> None:
        """Compile and check what is not there yet."""
        waiting = [unit for key, unit in wanted.items() if key not in self.done.binaries and not self._take(unit)]
        self.done.reused += len(wanted) - len(waiting)
        unproved = 0 if self.force else sum(self.cache.binary(unit.key) is not None for unit in waiting)
        self.observer.binaries(len(wanted), len(wanted) - len(waiting) + unproved)
        running: dict[int, _Running] = {}
        with self.cache.staging() as stage:
            try:
                if waiting and self.record is not None:
                    try_out(self.record, waiting[0].target, VERSION, self.cache, self.pool, stage)
                self._work(waiting, running, stage)
            except BaseException:
                self.pool.close()  # before the directory is removed, in which its compilers write
                raise
            finally:
                for entry in running.values():
                    entry.lock.close()

    def _choose(self, races: Sequence[Race]) -> None:
        """Time forms, one comparison at a time and nothing beside it, and store the best one of each unit."""
        waiting = [*races]
        while waiting:
            needed = {form.key: form for race in waiting for form in race.forms()}
            self._make({key: form for key, form in needed.items() if key not in self.done.binaries})
            for race in waiting:
                if race.fusion is not None and race.even:
                    race.skip()
                elif race.fusion is not None:
                    race.decide(self._time(race))
            waiting = [race for race in waiting if race.fusion is not None]
        for race in races:
            self._adopt(race)

    def _time(self, race: Race) -> list[dict[str, Any]]:
        unit = race.unit
        with self.cache.staging() as stage:
            job = TimeJob(
                id=next(self._ids), label=unit.label, text=unit.piece.text, device=unit.target.device,
                ops=self._ops(unit), fused=str(self._library(race.best)), apart=str(self._library(race.other)),
                points=unit.points(), lowest=unit.range.low(), values=unit.piece.values, directory=str(stage),
            )  # fmt: skip
            try:
                self.pool.send(job)
                reply = self.pool.receive()
            except BaseException:
                self.pool.close()  # before the directory is removed, in which it works
                raise
        self.done.compile_seconds += reply.seconds
        if reply.result is None:
            raise failure(unit, reply, checking=True)
        times: list[dict[str, Any]] = reply.result["times"]
        return times

    def _adopt(self, race: Race) -> None:
        """Store the best form as what was asked for."""
        files = {
            path.name.replace(race.best.key, race.unit.key): path for path in self.cache.binary_files(race.best.key)
        }
        record = msgspec.structs.replace(self.done.binaries[race.best.key], timed=tuple(race.timed))
        self.cache.store_binary(race.unit.key, files, record, force=True)
        self.done.binaries[race.unit.key] = record

    def _library(self, unit: Unit) -> Path:
        return self._files(unit)[f"{unit.key}.so"]

    def _take(self, unit: Unit) -> bool:
        """Use what the cache has."""
        found = None if self.force else self.cache.binary(unit.key)
        if found is not None and (found.checked or not self.prove):
            self.done.binaries[unit.key] = found
            return True
        return False

    def _work(self, waiting: list[Unit], running: dict[int, _Running], stage: Path) -> None:
        """Keep the pool busy; a unit that another build is compiling is left to that one."""
        at = time.perf_counter()
        fast = len(waiting) >= WORTH_HEADERS and len(waiting) > self.pool.jobs
        while waiting or running:
            for unit in list(waiting):
                if len(running) >= self.pool.jobs:
                    break
                lock = ExitStack()
                if not lock.enter_context(self.cache.try_lock(unit.key)):
                    lock.close()
                    continue
                waiting.remove(unit)
                if self._take(unit):  # another build has made it meanwhile
                    self.done.reused += 1
                    lock.close()
                    continue
                number = next(self._ids)
                running[number] = _Running(unit, stage / str(number), lock)
                self._start(number, running[number], fast)
            if running:
                checking = sum(bool(entry.compiled) for entry in running.values()) / len(running)
                reply = self.pool.receive()
                at, since = time.perf_counter(), at
                self.done.prove_seconds += checking * (at - since)
                self.done.compile_seconds += (1 - checking) * (at - since)
                self._advance(running, reply)
            elif waiting:
                with self.cache.lock(waiting[0].key):
                    pass  # wait for the other build, then look again

    def _start(self, number: int, entry: _Running, fast: bool) -> None:
        unit = entry.unit
        entry.directory.mkdir()
        self.observer.compiling(unit.label)
        found = None if self.force else self.cache.binary(unit.key)
        if found is not None:  # compiled without proof, which is wanted now
            entry.compiled = {"library": str(self._files(unit)[f"{unit.key}.so"]), "record": found}
            self._check(number, entry)
            return
        job = CompileJob(
            id=number, label=unit.label, text=unit.text or unit.piece.text, dims=unit.dims(), target=unit.target,
            options=unit.told(), ops=self._ops(unit), directory=str(entry.directory),
            scratch=str(self.cache.scratch("compiler")), fast=fast, record=self.record,
        )  # fmt: skip
        self.pool.send(job)

    def _check(self, number: int, entry: _Running) -> None:
        unit = entry.unit
        job = CheckJob(
            id=number, label=unit.label, text=unit.piece.text, device=unit.target.device, ops=self._ops(unit),
            library=entry.compiled["library"], points=unit.points() if self.prove else (),
            lowest=unit.range.low(), share=self.pool.jobs, values=unit.piece.values, directory=str(entry.directory),
        )  # fmt: skip
        if self.record is not None:  # it cannot be loaded here; what passes did can be looked at on the CPU
            points = tuple({tuple(p.items()): p for p in (unit.range.low(), small_point(unit.range))}.values())
            job = msgspec.structs.replace(
                job, device="cpu", library="", points=points if self.prove and unit.text else (),
                rewritten=unit.text or unit.piece.text,
            )  # fmt: skip
        self.pool.send(job)

    def _ops(self, unit: Unit) -> UserOps:
        """A user's file is run where its ops are called, and nowhere else: it may take long, or change settings of
        torch that the key of the binary does not know."""
        return self.ops if unit.piece.custom_ops else UserOps()

    def _advance(self, running: dict[int, _Running], reply: Reply) -> None:
        """A job ended: go on to the check, or store the binary."""
        entry = running[reply.id]
        unit = entry.unit
        if reply.result is None:
            raise failure(unit, reply, checking=bool(entry.compiled))
        if not entry.compiled:
            entry.compiled = reply.result
            entry.compile_seconds = reply.seconds
            self._check(reply.id, entry)
            return
        del running[reply.id]
        with entry.lock:
            self._store(entry, reply.result)
        self.observer.compiled(unit.label, entry.compile_seconds)

    def _store(self, entry: _Running, checked: dict[str, Any]) -> None:
        unit = entry.unit
        proof = tuple(Proof(piece=unit.piece.unique, **point) for point in checked["proof"])
        unproved = tuple(Unproved(piece=unit.piece.unique, **point) for point in checked["unproved"])
        record = entry.compiled.get("record")
        if record is None:
            library = Path(entry.compiled["library"])
            files = {f"{unit.key}.so": library}
            if entry.compiled["calls"]:
                files[f"{unit.key}.json"] = Path(entry.compiled["calls"])
            record = Binary(
                piece=unit.piece.unique, range=unit.range.label, bytes=library.stat().st_size,
                sha256=key.sha256_file(library), seconds=entry.compile_seconds,
                needs=machine.needed(library.read_bytes()),
                checked=self.prove, proof=proof, unproved=unproved, assumptions=tuple(entry.compiled["assumptions"]),
                kernels=tuple(msgspec.convert(entry.compiled["kernels"], list[Kernel])),
            )  # fmt: skip
            self.done.compiled += 1
        else:
            files = self._files(unit)
            record = msgspec.structs.replace(record, checked=self.prove, proof=proof, unproved=unproved)
            self.done.reused += 1
        self.cache.store_binary(unit.key, files, record, force=True)
        self.done.binaries[unit.key] = record
        shutil.rmtree(entry.directory, ignore_errors=True)

    def _files(self, unit: Unit) -> dict[str, Path]:
        return {path.name: path for path in self.cache.binary_files(unit.key)}
