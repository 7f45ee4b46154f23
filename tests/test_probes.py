"""Real faults of tools like this one; every file in tests/probes says what is right.

Each is traced at several example sizes, built with and without compiling, and called at several sizes; results are
compared with eager and with the probe's own arithmetic.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import fxc
from fxc import pipeline, trace
from fxc.errors import InputError
from fxc.models.files import load_file
from fxc.plan import make_plan
from fxc.runtime.program import Program
from fxc.shapes import Range
from fxc.spec import Spec, parse_spec
from tests.building import compare, make, program_of, target

PROBES = Path(__file__).parent / "probes"
SIZES = (1, 2, 3, 5, 8, 9, 16, 32)


class Probe(NamedTuple):
    file: str
    name: str
    inputs: dict[str, list[int | str]]
    split: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    tolerance: float = 1e-4

    @property
    def module(self) -> ModuleType:
        return load_file(PROBES / self.file)

    def data(self) -> dict[str, Any]:
        entries = {n: {"shape": s, "dtype": "int64" if n == "slots" else "float32"} for n, s in self.inputs.items()}
        if "slots" in entries:
            entries["slots"]["values"] = [-1, 32]
        return {
            "model": {"target": f"{PROBES / self.file}:{self.name}"},
            "device": "cpu",
            "inputs": entries,
            "dims": {"n": {"min": 1, "max": 32}},
            "compile": {"sizes": list(self.sizes)},
            "partition": {"splitting_ops": list(self.split)},
        }

    def spec(self, level: int) -> Spec:
        data = self.data()
        data["compile"]["level"] = level
        return parse_spec(data)


CACHES: dict[str, list[int | str]] = {"x": ["n", 8], "slots": ["n"], "keys": [32, 8], "values": [32, 8]}
VIEWS: dict[str, list[int | str]] = {"columns": ["n", 8], "shifted": ["n", 8], "repeated": ["n", 8]}
ALL = {
    "noop_slices": Probe("noop_slices.py", "NoopSlices", {"x": ["n", 12]}, sizes=(5,)),
    "snapshot_then_write": Probe("snapshot_then_write.py", "SnapshotThenWrite", {"x": ["n", 8]}),
    "sizes_across_cuts": Probe("sizes_across_cuts.py", "TwoAttentions", {"x": ["n", 16]}, ("probe::attend",)),
    "write_without_result": Probe("write_without_result.py", "WriteThenRead", CACHES, ("probe::look_up",)),
    "writes_are_cuts": Probe("write_without_result.py", "WriteThenRead", CACHES, ("probe::look_up", "probe::store")),
    "branch_on_size": Probe("branch_on_size.py", "BranchOnSize", {"x": ["n", 8]}),
    "gated_fp8": Probe("gated_fp8.py", "GatedVariants", {"x": ["n", 8]}, tolerance=0.07),
    "strided_inputs": Probe("strided_inputs.py", "TakesViews", VIEWS),
    "layout_broken": Probe("layout_broken.py", "LayoutBroken", {"x": ["n", 6]}, ("probe::mix_columns",)),
}
each = pytest.mark.parametrize("probe", ALL.values(), ids=ALL)


def run(probe: Probe, program: Program) -> None:
    """At all sizes, up and down again: equal to eager and to the probe's arithmetic, twice with equal inputs."""
    model = make(getattr(probe.module, probe.name), seed=len(probe.name))
    program.bind(copy.deepcopy(model))
    for n in (*SIZES, *reversed(SIZES)):
        inputs = probe.module.inputs(n)
        compare(model, model, program, inputs, f"{probe.name} at {n}", tolerance=probe.tolerance)
        passed = {key: value.clone() if value.is_contiguous() else value for key, value in inputs.items()}
        result = program(**passed)
        flat = list(result) if isinstance(result, tuple) else [result]
        flat += [passed[key] for key in ("keys", "values") if key in passed]
        for have, want in zip(flat, probe.module.expected(model, **inputs), strict=True):
            torch.testing.assert_close(have, want, rtol=probe.tolerance, atol=probe.tolerance)
            assert have.isfinite().all()


@each
@pytest.mark.parametrize("captured", [5, 16, 29])
def test_without_compiling(probe: Probe, captured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def hints(box: Range, avoid: set[int]) -> dict[str, int]:
        return {name: min(max(captured, low), high) for name, low, high in box.bounds}

    monkeypatch.setattr(trace, "hints", hints)
    run(probe, program_of(make_plan(probe.spec(0), PROBES, target())))


@each
def test_compiled(probe: Probe, compiled: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(probe.data(), sort_keys=False))
    result = pipeline.build(path, cache_dir=compiled, jobs=1)
    assert result.binaries["compiled"] == 0  # the fixture made them all
    run(probe, fxc.load(result.hash, cache_dir=compiled))


def test_slices_shorten() -> None:
    probe = ALL["noop_slices"]
    program = program_of(make_plan(probe.spec(0), PROBES, target())).bind(make(probe.module.NoopSlices))
    assert [tuple(t.shape) for t in program(**probe.module.inputs(1))] == [(1, 11), (1, 12), (1, 11), (12,)]


def test_only_tensors_cross_cuts() -> None:
    probe = ALL["sizes_across_cuts"]
    plan = make_plan(probe.spec(0), PROBES, target())
    kinds = [piece.kind for piece in plan.manifest.pieces["step_0"]]
    assert kinds == ["compiled", "eager", "compiled", "eager", "compiled"]
    text = plan.files["transformed_code.py"].decode()
    calls = [line.strip() for line in text.splitlines() if "= piece_" in line and "[" in line]
    assert len(calls) == 3
    assert not any("shape" in call or " n" in call.split("#")[0] for call in calls)


def test_the_ends_of_a_branch() -> None:
    probe = ALL["branch_on_size"]
    program = program_of(make_plan(probe.spec(0), PROBES, target()))
    assert program.explain(n=8).step != program.explain(n=9).step
    assert [program.explain(n=n).serves for n in (8, 9)] == ["n=1..8", "n=9..32"]


def test_a_written_input_must_be_as_declared() -> None:
    """A strided cache cannot be written in place: it is refused by name, never written as a copy."""
    probe = ALL["write_without_result"]
    program = program_of(make_plan(probe.spec(0), PROBES, target())).bind(make(probe.module.WriteThenRead))
    inputs = probe.module.inputs(3)
    with pytest.raises(InputError, match="keys"):
        program(**{**inputs, "keys": torch.zeros(8, 32).T})


def test_passes_know_slices_that_shorten() -> None:
    plan = make_plan(ALL["noop_slices"].spec(2), PROBES, target())
    (noop,) = [entry for entry in plan.manifest.passes if entry.matches]
    assert noop.name == "noop"
    for site in noop.sites:
        assert len(site.matches) == 5, "those that the probe adds up"
    for unit in plan.units:
        assert unit.text.count("aten.slice.Tensor") == 3, "the other results"


def test_passes_take_plain_gates_for_plain_gates_only() -> None:
    plan = make_plan(ALL["gated_fp8"].spec(2), PROBES, target())
    (entry,) = [entry for entry in plan.manifest.passes if entry.name == "gated_quant"]
    (site,) = entry.sites
    assert entry.matches == 1, "SiLU of the right half; the product with SiLU of the left one has two users"
    reasons = [miss.reason for miss in site.near_misses]
    assert len(reasons) == 4
    for words in ("is used by", "is aten::clamp, expected aten::silu", "has stride 2", "is used by"):
        reasons.remove(next(reason for reason in reasons if words in reason))


def test_passes_leave_the_copy_that_an_opaque_write_relies_on() -> None:
    plan = make_plan(ALL["snapshot_then_write"].spec(2), PROBES, target())
    assert [entry.matches for entry in plan.manifest.passes if entry.name == "noop"] == [0]
    names = [piece.name for piece in plan.manifest.pieces["step_0"]]
    assert names.count("aten::clone") == 2
