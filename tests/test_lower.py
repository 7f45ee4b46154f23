"""Units: keys, example sizes, options; and what an error of a job becomes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fxc import lower, machine
from fxc.cache import Cache
from fxc.errors import CompileError, ProofError
from fxc.inductor_options import options
from fxc.jobs import CheckJob, CompileJob, Reply, UserOps
from fxc.lower import Lowering, Unit, hint, unit
from fxc.progress import Observer
from fxc.region import Piece
from fxc.shapes import Range
from tests.building import target
from tests.test_boundaries import MODULES, TREES, imports
from tests.test_identity import OTHER, elsewhere

TEXT = 'def piece(in_0: "f32[n, 8]"):\n    neg = torch.ops.aten.neg.default(in_0)  # f32[n, 8]\n    return (neg,)\n'
PIECE = Piece(text=TEXT, dims=("n",), ops=1, custom_ops=(), random=False, values=(None,))
BOX = Range((("m", 1, 9), ("n", 1, 64)))


def made(**changes: Any) -> Unit:
    arguments: dict[str, Any] = {
        "piece": PIECE,
        "box": BOX,
        "level": 2,
        "target": target(),
        "name": "piece_0",
    } | changes
    return unit(**arguments)


def test_a_unit_has_only_the_dimensions_of_its_piece() -> None:
    assert made().range.label == "n=1..64"
    assert made().key == made(box=BOX.replace("m", 3, 3)).key


@pytest.mark.parametrize(
    "changes",
    [
        {"box": BOX.replace("n", 1, 65)},
        {"box": BOX.replace("n", 8, 8)},
        {"piece": dataclasses.replace(PIECE, text=TEXT.replace("neg", "abs"))},
        {"piece": dataclasses.replace(PIECE, custom_ops=("zoo::act(Tensor x) -> Tensor",))},
        *({"target": msgspec.structs.replace(target(), **{field: value})} for field, value in OTHER.items()),
        {"level": 3, "box": Range((("m", 1, 1), ("n", 8, 8)))},
    ],
)  # fmt: skip
def test_what_is_in_the_key(changes: dict[str, Any]) -> None:
    assert made(**changes).key != made().key


@pytest.mark.parametrize(
    "changes", [{"name": "piece_7"}, {"level": 1}, {"piece": dataclasses.replace(PIECE, ops=9, values=((0, 5),))}]
)
def test_what_is_not_in_the_key(changes: dict[str, Any]) -> None:
    """The piece's number, a level without effect, ranges of made-up values."""
    assert made(**changes).key == made().key


@pytest.mark.parametrize("change", [("cpp.threads", 8), ("another", True)])
def test_options_are_in_the_key(change: tuple[str, Any]) -> None:
    one = made()
    other = dataclasses.replace(one, options=tuple(sorted({**dict(one.options), change[0]: change[1]}.items())))
    assert other.key != one.key
    assert dataclasses.replace(one, options=one.options[::-1]).key == one.key


def test_surroundings_are_not_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = made(target=machine.probe("cpu")).key
    elsewhere(monkeypatch, tmp_path)
    assert made(target=machine.probe("cpu")).key == before


def test_the_version_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = made().key
    monkeypatch.setattr(lower, "VERSION", "next")
    assert made().key != before


APART = {
    "errors": "what is raised and shown",
    "manifest": "written of what was built",
    "models": "find and load what registers a user's ops, whose schemas are in the key",
    "ops": "run the same way by the binary and by eager; their schemas are in the key",
    "spec": "model.yaml, which no worker sees",
    "traced": "makes the graph whose text is in the key",
}
"""Modules that a worker imports and that decide no binary, each with why."""


def test_the_version_is_of_all_that_a_worker_runs() -> None:
    """And of what tells it what to do, and in which environment."""
    found: set[str] = set()
    apart: set[str] = set()
    waiting = ["_worker", "piece_jobs"]
    while waiting:
        name = waiting.pop()
        if (part := name.partition(".")[0]) in APART:
            apart.add(part)
        elif name not in found:
            found.add(name)
            waiting += [n.removeprefix("fxc.") for _, n in imports(TREES[f"fxc.{name}"]) if n in MODULES]
    assert found | {"choose", "inductor_options", "job_errors", "lower", "pool", "try_out"} == set(lower.MODULES)
    assert apart == set(APART)


@pytest.mark.parametrize(
    ("low", "high", "chosen"), [(1, 8192, 1021), (1, 64, 61), (8, 8, 8), (1, 2, 2), (0, 3, 3), (600, 700, 700)]
)
def test_example_sizes(low: int, high: int, chosen: int) -> None:
    assert hint(low, high) == chosen


def test_points_of_the_proof() -> None:
    assert made().points() == ({"n": 1}, {"n": 2}, {"n": 64}, {"n": 61})


def test_only_sizes_are_tuned() -> None:
    assert "max_autotune" in options(3, True, target())
    assert "max_autotune" not in options(3, False, target())
    assert options(2, True, target()) == options(1, False, target())


class Workers:
    """In place of a pool: answers at once, keeps what was asked."""

    jobs = 2

    def __init__(self, directory: Path, error: str = "", where: type[Any] = CompileJob) -> None:
        self.asked: list[CompileJob | CheckJob] = []
        self.waiting: list[CompileJob | CheckJob] = []
        self.library = directory / "made.so"
        self.error, self.where = error, where

    def send(self, job: CompileJob | CheckJob) -> None:
        self.asked.append(job)
        self.waiting.append(job)

    def close(self) -> None:
        self.waiting.clear()

    def receive(self) -> Reply:
        job = self.waiting.pop(0)
        if self.error and isinstance(job, self.where):
            return Reply(job.id, 0.5, error=self.error, detail="all of it")
        if isinstance(job, CheckJob):
            proof = [{"shape": f"n={point['n']}", "max_rel_err": 0.0, "tolerance": 1e-4} for point in job.points]
            return Reply(job.id, 0.5, result={"proof": proof, "unproved": []})
        self.library.write_bytes(job.text.encode())
        return Reply(
            job.id,
            0.5,
            result={"library": str(self.library), "calls": "", "assumptions": [], "kernels": [], "needs": {}},
        )


def lowered(cache: Path, workers: Workers, prove: bool = True, force: bool = False) -> lower.Lowered:
    one = Lowering(Cache.open(cache), workers, Observer(), ops=UserOps(), prove=prove, force=force)  # type: ignore[arg-type]
    return one.run([made(), made(name="piece_1"), made(box=BOX.replace("n", 8, 8))])


def test_equal_units_are_compiled_once(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    done = lowered(tmp_path / "cache", workers)
    assert (done.compiled, done.reused, len(done.binaries)) == (2, 0, 2)
    assert [type(job).__name__ for job in workers.asked] == ["CompileJob", "CompileJob", "CheckJob", "CheckJob"]
    again = lowered(tmp_path / "cache", Workers(tmp_path))
    assert (again.compiled, again.reused, again.binaries) == (0, 2, done.binaries)
    assert lowered(tmp_path / "cache", Workers(tmp_path), force=True).compiled == 2


def test_a_binary_without_proof_is_proved_later_not_compiled(tmp_path: Path) -> None:
    first = lowered(tmp_path / "cache", Workers(tmp_path), prove=False)
    assert {(binary.proof, binary.checked) for binary in first.binaries.values()} == {((), False)}
    workers = Workers(tmp_path)
    done = lowered(tmp_path / "cache", workers)
    assert (done.compiled, done.reused) == (0, 2)
    assert {type(job) for job in workers.asked} == {CheckJob}
    assert [point.shape for point in done.binaries[made().key].proof] == ["n=1", "n=2", "n=64", "n=61"]


@pytest.mark.parametrize(
    ("error", "where", "kind", "message"),
    [
        ("KeyError: 'x'", CompileJob, CompileError, "piece_0 n=1..64 does not compile: KeyError: 'x'"),
        (
            "MadeUpError: n=2: index out of range in self",
            CheckJob,
            ProofError,
            "piece_0 n=1..64 cannot be compared: eager fails on made-up inputs at n=2: index out of range in self",
        ),
        ("ProofError: result 0 at n=2", CheckJob, ProofError, "piece_0 n=1..64 does not equal eager: result 0 at n=2"),
        (
            "the process crashed (killed by SIGSEGV)",
            CheckJob,
            CompileError,
            "the binary of piece_0 n=1..64 does not run",
        ),
    ],
)
def test_errors_of_jobs(tmp_path: Path, error: str, where: type[Any], kind: type[Exception], message: str) -> None:
    workers: Any = Workers(tmp_path, error, where)
    one = Lowering(Cache.open(tmp_path / "cache"), workers, Observer(), ops=UserOps(), prove=True, force=False)
    with pytest.raises(kind, match=message) as caught:
        one.run([made()])
    assert TEXT in caught.value.__notes__[0]
    assert "all of it" in caught.value.__notes__[0]
    with Cache.open(tmp_path / "cache").try_lock(made().key) as free:
        assert free


@pytest.mark.parametrize(
    ("signal", "where", "hint"),
    [
        ("SIGSEGV", CheckJob, r"CXX=g\+\+"),
        ("SIGKILL", CheckJob, "memory was short"),
        ("SIGKILL", CompileJob, "memory was short"),
    ],
)
def test_what_a_signal_hints_at(tmp_path: Path, signal: str, where: type[Any], hint: str) -> None:
    workers: Any = Workers(tmp_path, f"the process crashed (killed by {signal})", where)
    one = Lowering(Cache.open(tmp_path / "cache"), workers, Observer(), ops=UserOps(), prove=True, force=False)
    with pytest.raises(CompileError) as caught:
        one.run([made()])
    assert re.search(hint, caught.value.hint)
