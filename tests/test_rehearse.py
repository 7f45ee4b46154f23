"""That a wrongly stitched program is found before anything is compiled, and what is said where nothing is compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxc import rehearse
from fxc.errors import ProofError
from fxc.plan import Plan
from tests.building import plan_of
from tests.zoo import calls, memory, sizes
from tests.zoo.model import Model, op


def run(plan: Plan) -> tuple[list[tuple[str, str, float]], list[tuple[str, str, str]]]:
    proof, unproved = rehearse.rehearse(plan.parts, plan.inputs, plan.weights, "cpu")
    return [(line.piece, line.shape, line.max_rel_err) for line in proof], [
        (line.piece, line.shape, line.reason) for line in unproved
    ]


class Lies(Model):
    """An op whose fake promises another shape."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.lie(x)
        return y * 2


class Throws(Model):
    """An op that gives another answer at each call."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.throw(x)
        return y


class Wide(Model):
    """A weight of 600 MB, of which nothing is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(150_000_000, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.long().clamp(0, 1)).squeeze(-1)


@op("lie(Tensor x) -> Tensor", fake=lambda x: x.new_empty(x.shape[0], 4))
def _lie(x: Tensor) -> Tensor:
    return x.clone()


calls_of_throw: list[None] = []


@op("throw(Tensor x) -> Tensor", fake=torch.empty_like)
def _throw(x: Tensor) -> Tensor:
    calls_of_throw.append(None)
    return x + len(calls_of_throw)


def test_every_step_runs_at_two_points() -> None:
    proof = [("step_0", "n=1", 0.0), ("step_0", "n=6", 0.0), ("step_1", "n=9", 0.0)]
    assert run(plan_of(sizes.BranchAbove)) == (proof, [])


def test_a_weight_in_the_wrong_place_is_found() -> None:
    plan = plan_of(calls.EqualLayers)
    first, second = plan.parts["step_0"].calls[1:3]
    assert first.piece.unique == second.piece.unique
    first.args, second.args = (
        [b if b.op == "placeholder" else a for a, b in zip(one.args, other.args, strict=True)]
        for one, other in ((first, second), (second, first))
    )
    with pytest.raises(ProofError, match=r"does not equal the traced graph: result 0 of step_0 at .*: relative error"):
        run(plan)


def test_a_write_that_is_lost_is_found() -> None:
    plan = plan_of(memory.IndexPut)
    part = plan.parts["step_0"]
    (write,) = [call for call in part.calls if not call.results]
    part.statements.remove(write)
    with pytest.raises(ProofError, match=r"result 0 of step_0|cache after step_0"):
        run(plan)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Wide, "weights and inputs take more than 512 MiB"),
        (Throws, "eager does not equal itself"),
    ],
)
def test_where_nothing_can_be_compared(cls: type[Model], reason: str) -> None:
    assert run(plan_of(cls)) == ([], [("step_0", "n=1", reason), ("step_0", "n=6", reason)])


def test_an_op_that_gives_another_shape_than_its_fake() -> None:
    with pytest.raises(ProofError, match=r"step_0 at n=1: lie has shape \[1, 8\], the trace says \[1, 4\]") as caught:
        run(plan_of(Lies))
    assert "fake" in caught.value.hint
