from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fxc.errors import DamagedError, InputError
from fxc.manifest import Input
from fxc.runtime import dispatch
from fxc.runtime.inputs import refuse
from fxc.shapes import Range, select

CPU = torch.device("cpu")
IDS = Input(name="input_ids", shape=("num_tokens",), dtype="int64")
POSITIONS = Input(name="positions", shape=("num_tokens",), dtype="int64")


def box(**bounds: int | tuple[int, int]) -> Range:
    return Range(tuple((name, *(at if isinstance(at, tuple) else (at, at))) for name, at in bounds.items()))


def make(inputs: Sequence[Input], ranges: Sequence[Range]) -> Callable[..., Any]:
    """A call whose steps answer with their index."""
    steps = [lambda *args, index=index: index for index in range(len(ranges))]
    return dispatch.compile_call(dispatch.source(inputs, ranges, CPU), inputs, ranges, CPU, steps)


GOLDEN = """\
def call(input_ids, positions):
    if _type(input_ids) is not _Tensor:
        input_ids = _plain('input_ids', input_ids)
    if _type(positions) is not _Tensor:
        positions = _plain('positions', positions)
    (num_tokens,) = input_ids.shape
    if not (
        input_ids.dtype is _int64 and input_ids.is_cpu
        and positions.dtype is _int64 and positions.is_cpu and positions.shape == (num_tokens,)
    ):
        _refuse((input_ids, positions))
    if not input_ids.is_contiguous():
        input_ids = _contiguous(input_ids)
    if not positions.is_contiguous():
        positions = _contiguous(positions)
    _step = _sizes_0.get(num_tokens)  # num_tokens=1; num_tokens=8
    if _step is None:
        if 1 <= num_tokens <= 256:
            _step = _step_2
        elif 257 <= num_tokens <= 8192:
            _step = _step_3
        else:
            _refuse((input_ids, positions))
    if _autocast('cpu'):
        return _plainly(_step, input_ids, positions)
    if _grad_enabled():
        _set_grad(False)
        try:
            return _step(input_ids, positions)
        finally:
            _set_grad(True)
    return _step(input_ids, positions)
"""


def test_the_text_for_one_dimension() -> None:
    ranges = [box(num_tokens=1), box(num_tokens=8), box(num_tokens=(1, 256)), box(num_tokens=(257, 8192))]
    assert dispatch.source([IDS, POSITIONS], ranges, CPU) == GOLDEN


def test_the_text_for_a_mutated_input_and_fixed_widths_on_cuda() -> None:
    inputs = [Input(name="cache", shape=(2, "n", 64), dtype="bfloat16", mutated=True)]
    text = dispatch.source(inputs, [box(n=(1, 8))], torch.device("cuda", 1))
    assert "(_0_cache, n, _2_cache) = cache.shape" in text
    assert (
        "cache.dtype is _bfloat16 and cache.get_device() == 1 and _0_cache == 2 and _2_cache == 64 "
        "and cache.is_contiguous() and cache.data_ptr() % 16 == 0 and not cache.is_neg()\n"
    ) in text
    assert "= _contiguous(" not in text
    assert "_sizes" not in text


def test_names_that_could_collide() -> None:
    inputs = [
        Input(name="type", shape=("step", "lambda"), dtype="int64"),
        Input(name="_refuse", shape=("type",), dtype="int64"),
        Input(name="Tensor", shape=("step",), dtype="int64"),
    ]
    call = make(inputs, [box(step=(1, 4), type=(1, 4), **{"lambda": (1, 4)})])
    two, three = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    assert call(torch.zeros(2, 4, dtype=torch.int64), three, two) == 0
    with pytest.raises(InputError, match="input Tensor has size 3 in dimension 0, expected 2, the step of input type"):
        call(torch.zeros(2, 4, dtype=torch.int64), three, three)


def test_a_dimension_that_no_input_has() -> None:
    with pytest.raises(DamagedError, match="no input has the dimension n"):
        dispatch.source([IDS], [box(n=(1, 8))], CPU)


@pytest.mark.parametrize(
    "ranges",
    [
        [box(batch=1, seq=1), box(batch=2, seq=8), box(batch=(1, 4), seq=(1, 8)), box(batch=(1, 4), seq=(9, 16))],
        [box(batch=(1, 4), seq=(1, 8)), box(batch=2, seq=(1, 16)), box(batch=2, seq=8)],
        [box(batch=(2, 2), seq=(3, 3)), box(batch=2, seq=3)],
        [box(batch=(1, 4), seq=(1, 16)), box(batch=1, seq=(1, 16)), box(batch=3, seq=(1, 16)), box(batch=3, seq=8)],
        [box(batch=1, seq=(1, 8)), box(batch=1, seq=(9, 16)), box(batch=(1, 4), seq=(1, 16)), box(batch=(1, 4), seq=4)],
    ],
)
def test_picks_as_select_does(ranges: list[Range]) -> None:
    inputs = [Input(name="x", shape=("batch", "seq"), dtype="float32")]
    call = make(inputs, ranges)
    for batch in range(6):
        for seq in range(18):
            x = torch.empty(batch, seq)
            try:
                expected = select(ranges, {"batch": batch, "seq": seq})
            except InputError as error:
                with pytest.raises(InputError) as info:
                    call(x)
                assert info.value.message == error.message  # noqa: PT017
            else:
                assert call(x) == expected


def test_quick_and_full_checks_agree_on_random_inputs() -> None:
    inputs = [
        Input(name="x", shape=("n", 3), dtype="float32"),
        Input(name="y", shape=("n", "m"), dtype="int64", mutated=True),
        Input(name="z", shape=(), dtype="bool"),
        Input(name="c", shape=("m", "m"), dtype="complex64"),
    ]
    ranges = [box(n=2, m=2), box(n=(1, 4), m=(1, 2))]
    call = make(inputs, ranges)
    pick = random.Random(0)
    accepted = overlapping = 0
    for _ in range(3000):
        n, m = pick.randint(0, 5), pick.randint(0, 3)
        values: list[Any] = [
            torch.zeros(n, 3),
            torch.zeros(n, m, dtype=torch.int64),
            torch.tensor(True),
            torch.zeros(m, m, dtype=torch.complex64),
        ]
        for _ in range(pick.choice((0, 0, 1, 2))):
            spoil = pick.choice(SPOILERS)
            at = pick.randrange(4)
            if isinstance(values[at], torch.Tensor):
                values[at] = spoil(values[at])
        if pick.random() < 0.1 and all(isinstance(value, torch.Tensor) and value.is_cpu for value in values):
            bytes_ = torch.zeros(400, dtype=torch.uint8)
            x = bytes_[(start := 4 * pick.randint(0, 60)) :][: n * 12].view(torch.float32).view(n, 3)
            y = bytes_[80 : 80 + n * m * 8].view(torch.int64).view(n, m)
            values[:2] = x, y
            overlapping += n * m > 0 and start < 80 + n * m * 8 and start + n * 12 > 80
        try:
            refuse(inputs, ranges, CPU, values, {}, {})
        except InputError:
            # The quick check trips over a wrong rank or a sparse tensor; `Program` then asks the full one for words.
            with pytest.raises((InputError, ValueError, RuntimeError)):
                call(*values)
        else:
            assert call(*values) == (0 if (n, m) == (2, 2) else 1)
            accepted += 1
    assert 300 < accepted < 2700
    assert overlapping > 30


SPOILERS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t.to(torch.complex128 if t.is_complex() else torch.float16),
    lambda t: t[None],
    lambda t: torch.cat((t, t)) if t.dim() else t,
    lambda t: t.t() if t.dim() == 2 else t,
    lambda t: t.to("meta"),
    lambda t: t.to_sparse() if t.dim() and t.is_cpu else t,
    lambda t: t.conj(),
    lambda t: t.to(torch.complex64).conj().imag if t.dtype == torch.float32 else t,
    lambda t: torch.nn.Parameter(t, requires_grad=False),
    lambda t: [t],
    lambda t: None,
)


def test_a_written_input_is_no_other_input() -> None:
    inputs = [
        Input(name="x", shape=("n",), dtype="float32"),
        Input(name="cache", shape=("n",), dtype="float32", mutated=True),
    ]
    call = make(inputs, [box(n=(1, 8))])
    both = torch.zeros(4)
    assert call(both, torch.zeros(4)) == 0
    with pytest.raises(InputError, match="input x is the same tensor as input cache, which the program writes into"):
        call(both, both)


X = Input(name="x", shape=("n",), dtype="float32")
CACHE = Input(name="cache", shape=("n",), dtype="float32", mutated=True)
OTHER = Input(name="other", shape=("n",), dtype="float32", mutated=True)


@pytest.mark.parametrize(
    ("x", "cache", "fits"),
    [
        (slice(0, 4), slice(4, 8), True),
        (slice(4, 8), slice(0, 4), True),
        (slice(0, 4), slice(3, 7), False),
        (slice(3, 7), slice(0, 4), False),
        (slice(0, 8, 2), slice(7, 11), True),
        (slice(0, 8, 2), slice(6, 10), False),
    ],
)
def test_a_written_input_overlaps_no_other_input(x: slice, cache: slice, fits: bool) -> None:
    base = torch.zeros(16)
    for inputs in ([X, CACHE], [OTHER, CACHE]) if x.step is None else ([X, CACHE],):
        call = make(inputs, [box(n=(1, 8))])
        if fits:
            assert call(base[x], base[cache]) == 0
            continue
        with pytest.raises(InputError) as info:
            call(base[x], base[cache])
        name, written = (inputs[0].name, "cache") if inputs[0] is X else ("cache", "other")
        assert info.value.message == (
            f"input {name} overlaps in memory with input {written}, which the program writes into"
        )
        assert info.value.hint == "pass a copy of it"


def test_another_view_of_a_written_input_is_refused_and_inputs_that_are_only_read_may_overlap() -> None:
    both = torch.zeros(4)
    with pytest.raises(InputError, match="input x overlaps in memory with input cache"):
        make([X, CACHE], [box(n=(1, 8))])(both, both.view_as(both))
    read = [X, Input(name="y", shape=("n",), dtype="float32")]
    assert make(read, [box(n=(1, 8))])(both, both) == 0
    assert "apart" not in dispatch.source(read, [box(n=(1, 8))], CPU)
    empty = torch.zeros(0)
    assert make([X, CACHE], [box(n=(0, 8))])(empty, empty) == 0


def test_a_negated_view_is_copied_and_one_that_is_written_refused() -> None:
    """The imaginary part of a conjugate is contiguous, and holds the numbers with the other sign."""
    values = torch.complex(torch.zeros(3), torch.ones(3)).conj()[:1].imag
    assert values.is_contiguous()
    assert values.is_neg()
    steps = [lambda x: x]
    call = dispatch.compile_call(dispatch.source([X], [box(n=(1, 8))], CPU), [X], [box(n=(1, 8))], CPU, steps)
    assert (call(values).is_neg(), call(values).tolist()) == (False, [-1.0])
    with pytest.raises(InputError, match="input cache is a lazy conjugate or negation"):
        make([CACHE], [box(n=(1, 8))])(values)
