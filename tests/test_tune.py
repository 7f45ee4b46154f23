"""What `fxc tune` compiles and writes; tests/gpu has the clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fxc import machine, tune, tuning
from fxc.cache import Artifact, Cache, key
from fxc.errors import CompileError, DamagedError, IncompatibleError, UsageError
from fxc.inductor_options import BY_RULES
from fxc.jobs import Reply, TuneJob
from fxc.manifest import Binary, Factor
from fxc.plan import Plan
from fxc.progress import Observer
from fxc.target import Target
from tests.building import HERE, plan_of
from tests.test_tuning import FAST, H200, RULES
from tests.zoo import calls

FOUND = {
    "hash": "aa",
    "name": "triton_poi_fused_relu_0",
    "configuration": FAST,
    "us": 2.0,
    "rules": RULES,
    "rules_us": 3.0,
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(calls.ActInside, level=2, sizes=[4])


def published(cache: Cache, plan: Plan, **changes: Any) -> Artifact:
    """The plan's artifact, with binaries that nobody has compiled."""
    source = cache.scratch("made") / "made.so"
    source.write_bytes(b"\x7fELF")
    made = {}
    for unit in plan.units:
        made[unit.key] = Binary(
            piece=unit.piece.unique, range=unit.range.label, bytes=4, sha256=key.sha256_file(source), seconds=1.0
        )
        cache.store_binary(unit.key, {f"{unit.key}.so": source}, made[unit.key])
    manifest = msgspec.structs.replace(plan.manifest, binaries=made, **changes)
    return cache.publish(manifest, "rank_0_0", plan.files, made)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "cache")


def test_units_are_those_of_the_build(cache: Cache, plan: Plan) -> None:
    """By rules, each once, without its model."""
    found = tune.units(published(cache, plan), HERE)
    assert [unit.scope for unit in found] == list(dict.fromkeys(unit.scope for unit in plan.units))
    assert [(unit.label, unit.text, unit.passes) for unit in found] == [
        (unit.label, unit.text, unit.passes) for unit in plan.units
    ]
    assert all(BY_RULES.items() <= unit.told().items() for unit in found)
    assert {bool(unit.piece.custom_ops) for unit in found} == {bool(unit.piece.custom_ops) for unit in plan.units}


def test_a_piece_that_is_not_what_was_built(cache: Cache, plan: Plan) -> None:
    files = {**plan.files, "pieces.py": plan.files["pieces.py"].replace(b"f32[", b"f64[")}
    artifact = published(cache, Plan(**{**vars(plan), "files": files}))
    with pytest.raises(DamagedError, match="piece_0 of artifact .* is not what was built"):
        tune.units(artifact, HERE)


def test_other_passes(cache: Cache, plan: Plan) -> None:
    factors = tuple(
        Factor(name=f.name, value="noop:other" if f.name == "passes" else f.value) for f in plan.manifest.factors
    )
    with pytest.raises(UsageError, match="passes are not what they were when artifact .* was built"):
        tune.units(published(cache, plan, factors=factors), HERE)


# Where it can be done


def test_not_for_a_cpu(cache: Cache, plan: Plan) -> None:
    with pytest.raises(UsageError, match="is for device cpu: only kernels of GPUs are tuned"):
        tune.tune(published(cache, plan), cache, HERE, Observer())


def here(target: Target, **changes: Any) -> Callable[[str], Target]:
    return lambda device: msgspec.structs.replace(target, **changes)


@pytest.fixture
def on_gpu(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The artifact's target: this machine with an H200."""
    target = msgspec.structs.replace(
        machine.here("cpu"), device="cuda", compute_capability=(9, 0), properties=H200.properties
    )
    monkeypatch.setattr(machine, "here", here(target))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"properties": {"name": "NVIDIA H100", "warp_size": 32}}, "is for NVIDIA H200, and this GPU is NVIDIA H100"),
        ({"compute_capability": (8, 0)}, "compute_capability: built for 9.0, here 8.0"),
        ({"torch": "2.99.0"}, "torch: built for"),
    ],
)
def test_another_gpu(
    cache: Cache, plan: Plan, on_gpu: Target, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(machine, "here", here(on_gpu, **changes))
    with pytest.raises(IncompatibleError, match=message):
        tune.tune(published(cache, plan, target=on_gpu), cache, HERE, Observer())


def test_nothing_to_time(cache: Cache, on_gpu: Target) -> None:
    plan = plan_of(calls.ActInside)
    with pytest.raises(UsageError, match="has no binaries: it is of level 0") as caught:
        tune.tune(published(cache, plan, target=on_gpu), cache, HERE, Observer())
    assert caught.value.hint == "-O2"
    compile = msgspec.structs.replace(plan.manifest.spec.compile, level=2)
    spec = msgspec.structs.replace(plan.manifest.spec, compile=compile)
    with pytest.raises(UsageError, match="has no binaries: all its ops run eagerly") as caught:
        tune.tune(published(cache, plan, target=on_gpu, spec=spec, hash="e" * 32), cache, HERE, Observer())
    assert caught.value.hint == ""


# What it writes


class Clock:
    """A pool whose jobs find one kernel each, at the same hash, until one fails."""

    def __init__(self) -> None:
        self.asked: list[TuneJob] = []
        self.found: list[dict[str, Any]] = [FOUND]
        self.error, self.fails_at = "", 1
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, jobs: int) -> Clock:
        assert jobs == 1, "nothing may run beside it"
        return self

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def send(self, job: TuneJob) -> None:
        self.asked.append(job)

    def receive(self) -> Reply:
        job = self.asked[-1]
        self.meanwhile()
        if self.error and len(self.asked) == self.fails_at:
            return Reply(job.id, 1.0, error=self.error, detail="all of it")
        return Reply(job.id, 1.0, result={"kernels": [dict(kernel) for kernel in self.found]})


@pytest.fixture
def clock(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(tune, "Pool", found)
    monkeypatch.setattr(tune, "units", lambda artifact, directory: plan.units)
    return found


def test_the_record(cache: Cache, plan: Plan, on_gpu: Target, clock: Clock) -> None:
    """It names all units that the kernel was found in, and keeps what was found in others."""
    name, old = tuning.file_name(on_gpu), tuning.Entry("old", FAST, 1.0, RULES, 2.0, ("u",))
    gone = msgspec.structs.replace(old, units=(plan.units[0].scope,))
    before = msgspec.structs.replace(tuning.empty(on_gpu), kernels={"old": old, "gone": gone})
    cache.update_tuning(name, lambda data: tuning.encode(before))
    tuned = tune.tune(published(cache, plan, target=on_gpu), cache, HERE, Observer())
    entry = msgspec.convert(
        {**{k: v for k, v in FOUND.items() if k != "hash"}, "units": sorted({unit.scope for unit in plan.units})},
        tuning.Entry,
    )
    assert tuned.kernels == {"aa": entry}
    assert (tuned.units, tuned.device, tuned.record) == (
        len(plan.units),
        "NVIDIA H200",
        str(cache.layout.tuning / name),
    )
    assert [job.text for job in clock.asked] == [unit.text or unit.piece.text for unit in plan.units]
    assert tuning.stored(cache, on_gpu).kernels == {"old": old, "aa": entry}
    taken, _ = tuning.find("auto", cache, on_gpu)
    assert taken is not None
    assert all(taken.apply(unit).told()["autotune_lookup_table"] == {"aa": FAST} for unit in plan.units)


def test_a_damaged_record_is_found_out_first(cache: Cache, plan: Plan, on_gpu: Target, clock: Clock) -> None:
    cache.update_tuning(tuning.file_name(on_gpu), lambda data: b"{}")
    with pytest.raises(DamagedError, match="is not a tuning record"):
        tune.tune(published(cache, plan, target=on_gpu), cache, HERE, Observer())
    assert not clock.asked


def test_a_piece_that_does_not_compile(cache: Cache, plan: Plan, on_gpu: Target, clock: Clock) -> None:
    """What was timed before stays."""
    clock.error, clock.fails_at = "RuntimeError: no kernel image", 2
    with pytest.raises(CompileError, match=f"{plan.units[1].label} does not compile: RuntimeError: no kernel image"):
        tune.tune(published(cache, plan, target=on_gpu), cache, HERE, Observer())
    (entry,) = tuning.stored(cache, on_gpu).kernels.values()
    assert entry.units == (plan.units[0].scope,)


def test_no_kernels(cache: Cache, plan: Plan, on_gpu: Target, clock: Clock) -> None:
    """No record is written, and one that is there is kept to what is still found."""
    artifact, clock.found = published(cache, plan, target=on_gpu), []
    assert tune.tune(artifact, cache, HERE, Observer()).record == ""
    assert cache.tuning(tuning.file_name(on_gpu)) == []
    old = tuning.Entry("old", FAST, 1.0, RULES, 2.0, ("u", plan.units[0].scope))
    before = msgspec.structs.replace(tuning.empty(on_gpu), kernels={"old": old})
    cache.update_tuning(tuning.file_name(on_gpu), lambda data: tuning.encode(before))
    found = tune.tune(artifact, cache, HERE, Observer())
    assert found.record == str(cache.layout.tuning / tuning.file_name(on_gpu))
    assert tuning.stored(cache, on_gpu).kernels == {"old": msgspec.structs.replace(old, units=("u",))}


def test_one_at_a_time(cache: Cache, plan: Plan, on_gpu: Target, clock: Clock) -> None:
    """On one kind of GPU: a second one says that it waits."""
    artifact, name, seen = published(cache, plan, target=on_gpu), tuning.lock_name(on_gpu), []
    assert name == "tune.nvidia-h200-sm_90"

    def try_it() -> None:
        with cache.try_lock(name) as held:
            seen.append(held)

    clock.meanwhile = try_it
    tune.tune(artifact, cache, HERE, Observer())
    assert seen == [False] * len(plan.units)

    class Notes(Observer):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)
            release.close()

    clock.meanwhile, notes, release = lambda: None, Notes(), ExitStack()
    release.enter_context(cache.lock(name))
    tune.tune(artifact, cache, HERE, notes)
    assert notes.notes == ["waiting for another `fxc tune` on such a GPU"]
