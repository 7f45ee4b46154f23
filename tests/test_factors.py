"""The table of factors in README is the code's; each factor is flipped by some test, and each exclusion here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from fxc import identity, lower, machine, plan
from fxc.cache.index import Entry
from fxc.manifest import Manifest
from fxc.ranks import Ranks
from fxc.spec import CudagraphSpec, parse_spec
from tests import test_identity, test_lower
from tests.building import target
from tests.test_identity import SPEC, Arguments, factors  # noqa: F401

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
TWO = """import torch

class Two(torch.nn.Module):
    def __init__(self, width, op):
        super().__init__()
        self.op = getattr(torch, op)

    def forward(self, x, y):
        return self.op(x) - y
"""


def table() -> dict[str, tuple[str, str, str]]:
    """By factor: the columns artifact, binary, lookup."""
    text = README.partition("| factor | artifact | binary | lookup | |\n|---|---|---|---|---|\n")[2].partition("\n\n")[
        0
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {name: (artifact, binary, lookup) for name, artifact, binary, lookup, _ in rows}


def column(index: int) -> set[str]:
    return {name.strip("`") for name, cells in table().items() if cells[index] == "yes"}


def named(arguments: Arguments) -> dict[str, str]:
    return {f.name: f.value for f in plan._factors(*(arguments[name] for name in test_identity.NAMES))}


def test_the_table_is_that_of_the_code(factors: Arguments) -> None:  # noqa: F811
    direct = {factor.name for factor in identity.direct_factors(parse_spec(SPEC), target(), Ranks())}
    assert column(0) == set(named(factors))
    assert column(1) == {name for name, _ in test_lower.made().factors}
    assert column(2) == direct | {name for name in Entry.__struct_fields__ if name not in ("hash", "created")}
    assert tuple(name for name, cells in table().items() if cells == ("no", "no", "")) == identity.EXCLUDED


def test_every_factor_of_an_artifact_is_flipped(factors: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    plain = named(factors)
    flips = [flip(factors) for flip in test_identity.IN_CONTENT.values()]
    changed = {name for flip in flips for name, value in named(flip).items() if value != plain[name]}
    others = [(lower, "VERSION", "next"), (plan, "FORMAT", 99), (identity, "fxc_version", lambda: "9")]
    for module, name, value in others:
        monkeypatch.setattr(module, name, value)
    changed |= {name for name, value in named(factors).items() if value != plain[name]}
    assert changed == set(plain)


def test_kernels_are_a_factor_where_they_become_part_of_binaries(
    factors: Arguments, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    cuda = {**factors, "target": msgspec.structs.replace(factors["target"], device="cuda")}
    before = [named(factors), named(cuda)]
    monkeypatch.setattr(lower, "KERNELS", "next")
    assert [named(factors) == before[0], named(cuda) == before[1]] == [True, False]


def test_every_factor_of_a_binary_is_flipped(monkeypatch: pytest.MonkeyPatch) -> None:

    plain = test_lower.made()
    piece = test_lower.PIECE
    others = [
        test_lower.made(box=test_lower.BOX.replace("n", 8, 8)),
        test_lower.made(piece=dataclasses.replace(piece, text=piece.text.replace("neg", "abs"))),
        test_lower.made(piece=dataclasses.replace(piece, custom_ops=("zoo::act(Tensor x) -> Tensor",))),
        test_lower.made(target=msgspec.structs.replace(target(), compiler="g++ 99")),
        dataclasses.replace(plain, options=(("another", True),)),
        dataclasses.replace(plain, passes="noop:1"),
        dataclasses.replace(plain, text="torch.ops.fxc.x"),
        dataclasses.replace(plain, record="h200"),
        dataclasses.replace(plain, tuning='{"kernel":{"XBLOCK":256}}'),
        dataclasses.replace(plain, forms=((frozenset({"noop"}), plain),)),
    ]
    changed = {name for other in others for (name, value), now in _pairs(plain, other) if value != now}
    assert len({plain.key, *(other.key for other in others)}) == len(others) + 1
    before = plain.factors
    monkeypatch.setattr(lower, "VERSION", "next")
    changed |= {name for (name, value), (_, now) in zip(before, plain.factors, strict=True) if value != now}
    assert changed == {name for name, _ in before}


def _pairs(one: lower.Unit, other: lower.Unit) -> list[tuple[tuple[str, str], str]]:
    return [(factor, value) for factor, (_, value) in zip(one.factors, other.factors, strict=True)]


def made(folder: Path, text: str = TWO, **changes: object) -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "two.py").write_text(text)
    spec = msgspec.structs.replace(parse_spec(SPEC), **changes)
    return plan.make_plan(spec, folder, machine.probe("cpu")).manifest


def _set(*names: str) -> Callable[[Path, pytest.MonkeyPatch], Manifest]:
    def flip(folder: Path, patched: pytest.MonkeyPatch) -> Manifest:
        for name in names:
            patched.setenv(name, "7")
        return made(folder)

    return flip


def _elsewhere(folder: Path, patched: pytest.MonkeyPatch) -> Manifest:
    return made(folder / "another place")


def _chdir(folder: Path, patched: pytest.MonkeyPatch) -> Manifest:
    patched.chdir("/")
    return made(folder)


def _comment(folder: Path, patched: pytest.MonkeyPatch) -> Manifest:
    return made(folder, "# Two numbers.\n\n" + TWO.replace("- y", "- y  # less"))


def _cores(folder: Path, patched: pytest.MonkeyPatch) -> Manifest:
    patched.setattr(os, "cpu_count", lambda: 61)
    patched.setattr(os, "sched_getaffinity", lambda pid: set(range(61)))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        return made(folder)
    finally:
        torch.set_num_threads(threads)


FLIPS: dict[str, Callable[[Path, pytest.MonkeyPatch], Manifest]] = {
    "folder": _elsewhere,
    "working directory": _chdir,
    "user": _set("USER", "LOGNAME", "HOME"),
    "host name": _set("HOSTNAME"),
    "environment variables": _set("PYTHONHASHSEED", "TORCHINDUCTOR_MAX_AUTOTUNE", "OMP_NUM_THREADS", "LANG"),
    "comments": _comment,
    "ranks": _set("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "cores": _cores,
    "cudagraph": lambda folder, patched: made(folder, cudagraph=CudagraphSpec(mode="none", sizes=({"n": 1, "m": 8},))),
}


@pytest.mark.parametrize("name", sorted(FLIPS))
def test_what_is_excluded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the artifact's name nor the keys of its binaries change."""
    plain, flipped = made(tmp_path), FLIPS[name](tmp_path, monkeypatch)
    assert (flipped.hash, flipped.programs) == (plain.hash, plain.programs)


def _gpu(patched: pytest.MonkeyPatch, **facts: int) -> None:
    properties = {"major": 9, "minor": 0, "name": "NVIDIA H200", "multi_processor_count": 132, **facts}
    patched.setattr(torch.cuda, "is_available", lambda: True)
    patched.setattr(torch.cuda, "device_count", lambda: 2)
    patched.setattr(torch.cuda, "current_device", lambda: 0)
    patched.setattr(torch.cuda, "get_device_properties", lambda index: type("Properties", (), properties))


@pytest.mark.parametrize("name", ["device index", "memory of the GPU"])
def test_what_is_excluded_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no part of a target."""
    _gpu(monkeypatch, total_memory=150 << 30)
    plain = machine.probe("cuda:0")
    _gpu(monkeypatch, total_memory=(150 if name == "device index" else 80) << 30)
    assert machine.probe("cuda:1" if name == "device index" else "cuda:0") == plain
    _gpu(monkeypatch, multi_processor_count=114)
    assert machine.probe("cuda:0") != plain


def test_every_exclusion_is_flipped() -> None:
    assert {*FLIPS, "device index", "memory of the GPU"} == set(identity.EXCLUDED)
