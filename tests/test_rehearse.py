"""That a wrongly stitched program is found before anything is compiled."""

from __future__ import annotations

import pytest

from fxc import rehearse
from fxc.errors import ProofError
from fxc.plan import Plan
from tests.building import plan_of
from tests.zoo import calls, sizes


def run(plan: Plan) -> list[tuple[str, str, float]]:
    lines = rehearse.rehearse(plan.parts, plan.inputs, plan.weights, "cpu")
    return [(line.piece, line.shape, line.max_rel_err) for line in lines]


def test_every_step_runs_at_two_points() -> None:
    assert run(plan_of(sizes.BranchAbove)) == [
        ("step_0", "n=1", 0.0), ("step_0", "n=6", 0.0), ("step_1", "n=9", 0.0),
    ]  # fmt: skip


def test_a_weight_in_the_wrong_place_is_found() -> None:
    plan = plan_of(calls.EqualLayers)
    first, second = [part for part in plan.parts["step_0"].calls if part.piece.unique][1:3]
    assert first.piece.unique == second.piece.unique
    first.args, second.args = (
        [b if b.op == "placeholder" else a for a, b in zip(one.args, other.args, strict=True)]
        for one, other in ((first, second), (second, first))
    )
    with pytest.raises(ProofError, match=r"does not equal the traced graph: result 0 of step_0 at .*: relative error"):
        run(plan)
