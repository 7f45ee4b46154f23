"""What was measured decides whether a fusion is kept for a range or size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from fxc.passes import costs, run
from fxc.passes.costs import Cost
from fxc.passes.gated_quant import GatedQuant
from fxc.shapes import Range
from tests.passes.pieces import outcome, piece, reasons


def gated(x: Tensor, scale: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return (silu(gate) * up / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


TEXT = piece(gated, {"x": "float32[n, 128]", "scale": "float32[]"})


def cost(
    rows: int, fused: float, apart: float, width: int = 64, fusion: str = "gated_quant", form: str = "static"
) -> Cost:
    return Cost(fusion, form, (9, 0), rows, width, fused, apart, "a.json")


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (1, 1, False),
        (1, 8, False),
        (2, 8, True),
        (8, 8, True),
        (8, 64, True),
        (1, 64, True),
        (64, 64, True),
        (2, 2, False),
    ],
)
def test_by_sizes(low: int, high: int, kept: bool) -> None:
    """What was measured between the ends of a range counts; where nothing was, what is nearest."""
    known = [cost(1, 3.0, 2.0), cost(8, 2.0, 2.5), cost(64, 2.0, 4.0), cost(1, 9.0, 1.0, width=4096)]
    ran = run(TEXT, Range((("n", low, high),)), [GatedQuant()], known)
    assert bool(outcome(ran, "gated_quant").matches) == kept
    assert (ran.text == TEXT) == (not kept)
    if not kept:
        reason = "to: was measured slower: 3 µs as one kernel, 2 µs apart at 1 rows of 64 (a.json)"
        assert reasons(ran, "gated_quant") == [reason]
        assert ran.changed_by == ()


@pytest.mark.parametrize("known", [[], [cost(1, 9.0, 1.0, fusion="norm_quant")], [cost(1, 9.0, 1.0, form="per token")]])
def test_what_nothing_was_measured_of_is_kept(known: list[Cost]) -> None:
    assert outcome(run(TEXT, Range((("n", 1, 64),)), [GatedQuant()], known), "gated_quant").matches


def test_scales_that_are_computed_have_measurements_of_their_own() -> None:
    def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, -1)
        y = silu(gate) * up
        scale = (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-9)
        return (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    text = piece(per_token, {"x": "float32[n, 128]"})
    for form, kept in (("static", True), ("per block", True), ("per token", False)):
        ran = run(text, Range((("n", 1, 64),)), [GatedQuant()], [cost(1, 9.0, 1.0, form=form)])
        assert bool(outcome(ran, "gated_quant").matches) == kept, form


def test_the_table_has_measurements_with_their_source() -> None:
    text = (Path(__file__).parents[2] / costs.H200).read_text()
    lines = [eval(line.rstrip(","), {"Cost": Cost, "H200": costs.H200}) for line in json.loads(text)["costs"]]
    assert list(costs.COSTS) == lines
    for entry in costs.COSTS:
        assert entry.fused_us > 0 < entry.apart_us
    assert costs.of((1, 0)) == costs.of(None) == ()


def test_the_table_is_in_the_name_of_the_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    from fxc.rewrite import Found
    from tests.building import target

    gpu: Any = msgspec.structs.replace(target(), compute_capability=(9, 0))
    before = [Found([GatedQuant()], gpu, level).identity for level in (2, 3)]
    monkeypatch.setattr(costs, "COSTS", (cost(1, 1.0, 2.0),))
    after = [Found([GatedQuant()], gpu, level).identity for level in (2, 3)]
    assert before[0] != after[0]
    assert before[1] == after[1], "at level 3 nobody asks it"
