"""Capturing without a GPU: a recorder that calls again instead of replaying. What graphs themselves do is tests/gpu's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import span

from fxc.errors import InputError, RunError, UsageError
from fxc.manifest import Input, Piece, Program, Tensor, Weight
from fxc.runtime import Program as Loaded
from fxc.runtime import load
from fxc.runtime.recorder import Recorder
from fxc.shapes import Range

Make = Callable[..., Path]


class CallingAgain(Recorder):
    """Results have one address, as those of a graph have."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free = 1 << 30
        self.costs = 1000
        self.kept: list[Any] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def record(self, call: Callable[[], Any], of: Callable[..., Any]) -> tuple[Callable[[], None], Any]:
        result = call()
        self.free -= self.costs
        leaves = list(result) if isinstance(result, (tuple, list)) else [result]
        self.kept.append(leaves)

        def replay() -> None:
            again = call()
            for old, new in zip(leaves, again if isinstance(again, (tuple, list)) else [again], strict=True):
                old.copy_(new)

        return replay, result

    def make(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.kept.append(made := call())
        return made

    def free_bytes(self) -> int:
        return self.free


ONE = '''"""tiny"""
import torch
WEIGHTS = ("w",)
def step_0(pieces, weights, empty=torch.empty):
    (piece_0,) = pieces
    (w,) = weights
    def step(x):
        (y,) = piece_0([x, w])
        return y
    return step
def piece_0(args):
    x, w = args
    return (x * w + x.amax() * 0,)
PIECES = {"step_0": (piece_0,)}
'''
"""`amax` over all rows: a NaN among pad rows would show everywhere."""


def one(artifact: Make, pad: int | str | None = 0) -> Loaded:
    path = artifact(
        code=ONE, constants={}, weights=(Weight(name="w", shape=(4,), dtype="float32"),),
        inputs=(Input(name="x", shape=("n", 4), dtype="float32", pad=pad),),  # type: ignore[arg-type]
        results=(Tensor(name="y", shape=("n", 4), dtype="float32"),),
        pieces={"step_0": (Piece("piece_0", "compiled", "a", 1, ("n",)),)},
        programs=(Program(range=span(4, 4), step="step_0", binaries=()),
                  Program(range=span(1, 16), step="step_0", binaries=())),
    )  # fmt: skip
    program = load(path)
    program._recorder = CallingAgain
    return program.bind({"w": torch.arange(4.0)})


def rows(n: int) -> torch.Tensor:
    return torch.arange(4.0 * n).view(n, 4) + 1


@pytest.mark.parametrize("pad", [0, "last"])
@pytest.mark.parametrize("mode", ["full", "piecewise", "full_and_piecewise"])
def test_every_size_from_one_to_one_more_than_all(artifact: Make, mode: str, pad: int | str) -> None:
    program = one(artifact, pad)
    recorded = program.capture(mode, [2, 8, 5])
    assert [entry.size["n"] for entry in recorded] == [8, 5, 2]
    used = "full" if mode != "piecewise" else "piecewise"
    assert {entry.mode for entry in recorded} == {used}
    padding = 0
    for n in range(1, 17):
        x = rows(n)
        assert torch.equal(program(x), x * torch.arange(4.0)), n
        size = next((size for size in (2, 5, 8) if size >= n), None)
        found = program.explain(n=n).graph
        assert found is not None
        assert (found.mode, found.size) == ((used, {"n": size}) if size else ("compiled", {}))
        padding += size - n if size else 0
    counters = program.counters
    assert (getattr(counters, used), counters.compiled, counters.padding) == (8, 8, padding)
    with pytest.raises(InputError, match="n = 17 is out of bounds"):
        program(rows(17))


def test_a_pad_row_is_harmless_whatever_was_there(artifact: Make) -> None:
    program = one(artifact)
    program.capture(sizes=[8])
    assert program(torch.full((8, 4), float("nan"))).isnan().all()
    assert torch.equal(program(rows(3)), rows(3) * torch.arange(4.0))


def test_without_pad_only_the_very_sizes(artifact: Make) -> None:
    program = one(artifact, pad=None)
    program.capture(sizes=[8])
    program(rows(8))
    program(rows(7))
    assert (program.counters.full, program.counters.compiled) == (1, 1)
    assert "model.yaml does not say what to pad x with" in str(program.explain(n=7))


def test_results_are_overwritten_unless_copied(artifact: Make) -> None:
    program = one(artifact)
    program.capture(sizes=[4])
    first = program(rows(4))
    program(rows(4) + 1)
    assert torch.equal(first, (rows(4) + 1) * torch.arange(4.0))
    program.capture(sizes=[4], copy=True)
    first = program(rows(4))
    program(rows(4) + 1)
    assert torch.equal(first, rows(4) * torch.arange(4.0))


def test_a_weight_that_moved(artifact: Make) -> None:
    program = one(artifact)
    program.capture(sizes=[4])
    weight = program._weights[0]  # type: ignore[index]
    weight.mul_(2)
    assert torch.equal(program(rows(4)), rows(4) * torch.arange(4.0) * 2)
    weight.set_(torch.ones(4).untyped_storage())
    with pytest.raises(RunError, match="w has moved since the graphs were captured"):
        program(rows(4))
    program.bind({"w": torch.ones(4)})  # drops the graphs
    assert torch.equal(program(rows(4)), rows(4))
    assert program.explain(n=4).graph is None


def test_lazy(artifact: Make) -> None:
    program = one(artifact)
    assert program.capture(sizes=[2, 4, 8], lazy=True) == []
    assert torch.equal(program(rows(3)), rows(3) * torch.arange(4.0))
    assert (program.counters.compiled, program.counters.full) == (1, 0)
    assert [entry.size for entry in program.capture_marked()] == [{"n": 4}]
    assert program.capture_marked() == []
    program(rows(3))
    assert (program.counters.compiled, program.counters.full, program.counters.padding) == (1, 1, 1)
    program(rows(1))  # by the graph of 4 this time; 2 would be better
    assert [entry.size for entry in program.capture_marked()] == [{"n": 2}]
    program(rows(1))
    assert program.counters.padding == 1 + 3 + 1


def test_a_memory_limit(artifact: Make) -> None:
    program = one(artifact)
    recorded = program.capture(sizes=[2, 4, 8, 16], memory_limit=2500)
    assert [entry.size["n"] for entry in recorded] == [16, 2]
    assert program.capture(sizes=[2, 4], memory_limit=999) == []
    program(rows(3))
    assert program.counters.compiled == 1


def test_modes_and_sizes_that_are_refused(artifact: Make) -> None:
    program = one(artifact)
    with pytest.raises(UsageError, match="capture mode 'fully', expected none, piecewise, full or full_and_piecewise"):
        program.capture("fully")
    with pytest.raises(InputError, match="n = 17 is out of bounds"):
        program.capture(sizes=[17])
    with pytest.raises(InputError, match="sizes: m=3 is no size to capture: m"):
        program.capture("piecewise", sizes=[{"m": 3}])
    assert program.capture("none") == []


TWO = '''"""tiny"""
import torch
WEIGHTS = ()
def step_0(pieces, weights, empty=torch.empty):
    piece_0, piece_1, piece_2 = pieces
    def step(x, marks, starts):
        n = x.shape[0]
        (h,) = piece_0([x])
        a = empty((n, 2), dtype=torch.float32, device=x.device)
        piece_1([h, starts, a])
        b = EAGER(a)
        y, total = piece_2([a, b, h])
        return y, total
    return step
def piece_0(args):
    return (args[0] * 2,)
def piece_1(args):
    """Sums over each segment that `starts` says; zeros behind the last."""
    h, starts, a = args
    a.zero_()
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist()):
        a[first:last] = h[first:last].sum(0)
    return ()
def piece_2(args):
    a, b, h = args
    return a + b + h, a.sum().view(1)
def EAGER(a):
    return a.clone() + 1
PIECES = {"step_0": (piece_0, piece_1, piece_2)}
'''


@pytest.fixture
def two(artifact: Make) -> Loaded:
    box = Range((("n", 1, 12), ("r", 1, 4)))
    path = artifact(
        code=TWO, constants={}, weights=(),
        inputs=(
            Input(name="x", shape=("n", 2), dtype="float32", pad=0),
            Input(name="marks", shape=("r",), dtype="int64", pad=0),
            Input(name="starts", shape=("r + 1",), dtype="int64", pad="last"),
        ),
        results=(Tensor(name="y", shape=("n", 2), dtype="float32"), Tensor(name="total", shape=(1,), dtype="float32")),
        pieces={"step_0": (
            Piece("piece_0", "compiled", "a", 1, ("n",)), Piece("piece_1", "compiled", "b", 1, ("n", "r")),
            Piece("my::eager", "eager", "my::eager"), Piece("piece_2", "compiled", "c", 1, ("n",)),
        )},
        programs=(Program(range=box, step="step_0", binaries=()),),
    )  # fmt: skip
    program = load(path)
    program._recorder = CallingAgain
    return program


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return {"x": rows(sum(lengths))[:, :2].contiguous(), "marks": torch.zeros(len(lengths)).long(), "starts": starts}


def expected(x: torch.Tensor, starts: torch.Tensor, **_: torch.Tensor) -> list[torch.Tensor]:
    h = x * 2
    a = torch.zeros_like(h)
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        a[first:last] = h[first:last].sum(0)
    return [a + a + 1 + h, a.sum().view(1)]


def same(found: Any, wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


BATCHES = [batch(3), batch(1, 4), batch(1, 1, 1), batch(2, 2, 2, 2), batch(8), batch(1), batch(5, 4), batch(12)]


def test_piecewise_graphs_serve_any_number_of_requests(two: Loaded) -> None:
    """What depends on the free dimension runs as it is, and writes where the graphs read."""
    recorded = two.capture("piecewise", [{"n": 8}, {"n": 4}])
    assert [(entry.mode, entry.size) for entry in recorded] == [("piecewise", {"n": 8}), ("piecewise", {"n": 4})]
    for inputs in BATCHES:
        assert same(two(**inputs), expected(**inputs))
    counters = two.counters
    assert (counters.piecewise, counters.compiled, counters.padding) == (6, 2, 1 + 3 + 1 + 0 + 0 + 3)


def test_a_piece_that_writes_between_graphs_makes_nothing_new(two: Loaded) -> None:
    two.capture("piecewise", [{"n": 8}])
    graphs = two._graphs
    assert graphs is not None
    (wish,) = graphs.wishes
    assert wish.captured == (True, False, True)
    addresses = {two(**inputs)[0].data_ptr() for inputs in BATCHES[:4]}
    assert len(addresses) == 1


def test_full_and_piecewise(two: Loaded) -> None:
    recorded = two.capture("full_and_piecewise", [{"n": 4, "r": 4}, {"n": 8}])
    assert [(entry.mode, entry.size) for entry in recorded] == [
        ("full", {"n": 4, "r": 4}), ("piecewise", {"n": 8}),
    ]  # fmt: skip
    for inputs in BATCHES:
        assert same(two(**inputs), expected(**inputs))
    counters = two.counters
    assert (counters.full, counters.piecewise, counters.compiled) == (3, 3, 2)
    assert str(two.explain(n=5, r=2)) == (
        "n=1..12,r=1..4 (step_0): n = 5, r = 2 is not one of the compiled sizes (none) and lies in this range; "
        "piecewise n=8: padded from n=5"
    )


def test_a_size_that_leaves_a_dimension_free_is_none_for_whole_steps(two: Loaded) -> None:
    with pytest.raises(InputError, match="sizes: n=8 is no size to capture: r"):
        two.capture("full", [{"n": 8}])


class Refusing(CallingAgain):
    """As a GPU does where an op waits for a result."""

    def record(self, call: Callable[[], Any], of: Callable[..., Any]) -> tuple[Callable[[], None], Any]:
        if of.__name__ == "step":
            call()
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return super().record(call, of)


def test_whole_steps_that_cannot_be_captured(two: Loaded) -> None:
    two._recorder = Refusing
    with pytest.raises(RunError, match="n=4,r=2 cannot be captured: RuntimeError: operation not permitted") as info:
        two.capture("full", [{"n": 4, "r": 2}])
    assert info.value.hint.startswith("capture piecewise")
    assert same(two(**BATCHES[0]), expected(**BATCHES[0]))
    recorded = two.capture("full_and_piecewise", [{"n": 4, "r": 2}])
    assert [entry.mode for entry in recorded] == ["piecewise"]
    inputs = batch(2, 2)
    assert same(two(**inputs), expected(**inputs))
    assert two.counters.piecewise == 1
    assert "n=4,r=2 cannot be captured" in str(two.explain(n=9, r=1))


def test_a_typo_in_sizes_drops_nothing(artifact: Make) -> None:
    program = one(artifact)
    program.capture(sizes=[8])
    with pytest.raises(InputError):
        program.capture(sizes=[17])
    program(rows(8))
    assert program.counters.full == 1


def test_explain_marks_nothing(artifact: Make) -> None:
    program = one(artifact)
    program.capture(sizes=[2, 8], lazy=True)
    assert str(program.explain(n=5)).endswith("compiled: no full graph is captured; no piecewise graph is captured")
    assert program.capture_marked() == []


def test_a_limit_holds_for_what_is_captured_later(artifact: Make) -> None:
    program = one(artifact)
    program.capture(sizes=[2, 4, 8], lazy=True, memory_limit=1500)
    for n in (2, 4, 8):
        program(rows(n))
    assert [entry.size["n"] for entry in program.capture_marked()] == [8]
    program(rows(3))
    assert program.capture_marked() == []


def test_nobody_calls_while_graphs_are_recorded(artifact: Make) -> None:
    program = one(artifact)
    with program._alone(), pytest.raises(RunError, match="another thread is in this program"):
        program.capture(sizes=[8])
    assert len(program.capture(sizes=[8])) == 1


STATE = '''"""tiny"""
import torch
WEIGHTS = ("calls",)
def step_0(pieces, weights, empty=torch.empty):
    (piece_0,) = pieces
    (calls,) = weights
    def step(x, mask, log):
        (y,) = piece_0([x, mask, calls, log])
        EAGER(y)
        return y
    return step
def piece_0(args):
    x, mask, calls, log = args
    calls.add_(1)
    log[0] = calls
    return (x * calls + mask.sum(),)
def EAGER(y):
    pass
PIECES = {"step_0": (piece_0,)}
'''
"""Writes into a weight and into a bound input, whose size another input of each call has, too."""


@pytest.fixture
def state(artifact: Make) -> Loaded:
    box = Range((("n", 1, 8), ("slots", 1, 8)))
    program = load(artifact(
        code=STATE, constants={}, weights=(Weight(name="calls", shape=(1,), dtype="float32", mutated=True),),
        inputs=(
            Input(name="x", shape=("n",), dtype="float32", pad=0), Input(name="mask", shape=("slots",), dtype="float32"),
            Input(name="log", shape=("slots",), dtype="float32", bound=True, mutated=True),
        ),
        results=(Tensor(name="y", shape=("n",), dtype="float32"),),
        pieces={"step_0": (Piece("piece_0", "compiled", "a", 1, ("n", "slots")),)},
        programs=(Program(range=box, step="step_0", binaries=()),),
    ))  # fmt: skip
    program._recorder = CallingAgain
    program.bind({"calls": torch.zeros(1)})
    return program.bind_inputs({"log": torch.full((4,), 9.0)})


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_what_is_written_is_as_before_the_capture(state: Loaded, mode: str) -> None:
    assert len(state.capture(mode, [{"n": 2}])) == 1
    assert state._inputs["log"].tolist() == [9.0] * 4
    for call in (1, 2):
        assert state(torch.ones(2), torch.ones(4)).tolist() == [call + 4.0] * 2
    assert state._inputs["log"].tolist() == [2.0, 9.0, 9.0, 9.0]
    assert getattr(state.counters, mode) == 2


def test_what_is_written_is_as_before_a_capture_that_failed(state: Loaded) -> None:
    state._recorder = Refusing
    with pytest.raises(RunError, match="cannot be captured"):
        state.capture("full", [{"n": 2}])
    assert state(torch.ones(2), torch.ones(4)).tolist() == [5.0, 5.0]
    assert len(state.capture("full_and_piecewise", [{"n": 2}])) == 1
    assert "n=2 cannot be captured" in state.capture_failures["full"]
    assert state(torch.ones(2), torch.ones(4)).tolist() == [6.0, 6.0]


def test_neither_whole_steps_nor_pieces(two: Loaded) -> None:
    two._recorder = Refusing
    two.manifest.pieces.clear()
    with pytest.raises(RunError, match="n=4,r=2 cannot be captured"):
        two.capture("full_and_piecewise", [{"n": 4, "r": 2}])
    assert same(two(**BATCHES[0]), expected(**BATCHES[0]))
