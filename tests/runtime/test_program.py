from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import span

from fxc.errors import InputError, RunError, WeightError
from fxc.manifest import Input, Program
from fxc.runtime import load
from fxc.shapes import Range

Make = Callable[..., Path]


@pytest.fixture
def program(artifact: Make) -> Any:
    return load(artifact()).bind({"linear.weight": torch.eye(4)})


def good(n: int = 3) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(n, 4), "scale": torch.ones(n, 1)}


OUT = [2.0, 3.0, 4.0, 5.0]


def test_by_name_by_position_and_mixed(program: Any) -> None:
    x, scale = good().values()
    for out in (program(x=x, scale=scale), program(scale=scale, x=x), program(x, scale), program(x, scale=scale)):
        assert out.tolist() == [OUT] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "input scale, expected float32[n, 1]: missing"),
        ({"x": None, "scale": None}, "input x, expected float32[n, 4], scale, expected float32[n, 1]: missing"),
        ({"scales": torch.ones(3, 1)}, "scales is not an input; the program takes x, scale"),
        ({"x": [1.0, 2.0]}, "input x is list [1.0, 2.0], expected a torch.Tensor"),
        ({"x": torch.ones(3, 4).half()}, "input x has dtype float16, expected float32"),
        ({"x": torch.ones(3, 4, device="meta")}, "input x is on meta, expected cpu"),
        ({"x": torch.ones(3)}, "input x has 1 dimensions, float32[3], expected 2, float32[n, 4]"),
        ({"x": torch.ones(3, 5)}, "input x has size 5 in dimension 1, expected 4"),
        ({"scale": torch.ones(2, 1)}, "input scale has size 2 in dimension 0, expected 3, the n of input x"),
        ({"x": torch.ones(3, 4).to_sparse()}, "input x has layout torch.sparse_coo, expected torch.strided"),
        (good(65), "n = 65 is out of bounds: the program was built for 1 to 64"),
        (good(0), "n = 0 is out of bounds: the program was built for 1 to 64"),
    ],
)
def test_a_wrong_input_is_named(program: Any, change: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in {**good(), **change}.items() if value is not None}
    with pytest.raises(InputError) as info:
        program(**given)
    assert info.value.message == message


def test_hints(program: Any) -> None:
    with pytest.raises(InputError) as info:
        program(**good(), scales=torch.ones(3, 1))
    assert info.value.hint == "did you mean scale?"
    with pytest.raises(InputError) as info:
        program(x=torch.ones(3, 4).double(), scale=torch.ones(3, 1))
    assert info.value.hint == "cast it: x.to(torch.float32)"


def test_too_many_and_repeated_inputs(program: Any) -> None:
    x, scale = good().values()
    with pytest.raises(InputError, match=r"3 positional inputs, expected at most 2: x, scale"):
        program(x, scale, x)
    with pytest.raises(InputError, match=r"input x is given twice, by position and by name"):
        program(x, x=x)


def test_a_tensor_subclass(program: Any) -> None:
    class Tagged(torch.Tensor):
        pass

    class Elsewhere(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise AssertionError

    scale = torch.ones(3, 1)
    for kind in (torch.nn.Parameter, lambda t: t.as_subclass(Tagged)):
        out = program(x=kind(torch.ones(3, 4)), scale=scale)
        assert type(out) is torch.Tensor
        assert (out.tolist(), out.requires_grad) == ([OUT] * 3, False)
    with pytest.raises(InputError, match="input x is a Elsewhere, whose memory a compiled program cannot read"):
        program(x=torch.ones(3, 4).as_subclass(Elsewhere), scale=scale)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor(program: Any) -> None:
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
        with pytest.raises(InputError, match="input x is a nested tensor, expected a torch.Tensor of one shape"):
            program(x=nested, scale=torch.ones(3, 1))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_program_is_not_copied(program: Any, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(RunError) as info:
        copied(program)
    assert info.value.message == (
        "a loaded program cannot be copied or pickled: it holds compiled code of this process"
    )
    assert info.value.hint == f"load it again instead: fxc.load('{program.manifest.hash}')"


class Biased(torch.nn.Module):
    """The module of the artifact, `bias` being a constant of its manifest."""

    def __init__(self, bias: torch.Tensor, **kind: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("bias", bias, persistent=False)


BIAS = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("built", "bound", "fits"),
    [
        (BIAS, BIAS, True),
        (BIAS, BIAS * 1.0005, True),
        (BIAS, BIAS * 1.01, False),
        (BIAS, BIAS.double() + 1, True),
        (BIAS, BIAS[:2] + 1, True),
        (BIAS, (BIAS + 1).to("meta"), True),
        (torch.tensor([-torch.inf, torch.nan]), torch.tensor([-torch.inf, torch.nan]), True),
        (torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, -1e9]), False),
        (torch.arange(2000), torch.arange(2000), True),
        (torch.arange(2000), torch.arange(2000) + (torch.arange(2000) == 1999), False),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.ones(2).bfloat16(), torch.full((2,), 1 + 2**-7).bfloat16(), True),
        (torch.ones(2).bfloat16(), torch.full((2,), 1.25).bfloat16(), False),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.full((2,), 2.0).to(torch.float8_e4m3fn), False),
        (torch.ones(2, dtype=torch.complex64), torch.full((2,), 1 + 1j), False),
    ],
)
def test_a_bound_module_has_the_constants_of_the_build(
    artifact: Make, built: torch.Tensor, bound: torch.Tensor, fits: bool
) -> None:
    program = load(artifact(constants={"bias": built}))
    if fits:
        program.bind(Biased(bound))
        return
    with pytest.raises(WeightError) as info:
        program.bind(Biased(bound))
    assert info.value.message == (
        "buffer bias of the module has other values than when the program was built, which has its own: "
        "it is not persistent"
    )
    assert info.value.hint.startswith("build the model again as it is now")
    with pytest.raises(RunError, match="the program has no weights yet"):
        program(**good())


def test_strided_inputs_are_copied(compiled: Path) -> None:
    program = load(compiled).bind({"linear.weight": torch.eye(4)})
    columns = torch.arange(12.0).reshape(4, 3).t()
    expected = columns.contiguous() + torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(program(x=columns, scale=torch.ones(1, 1).expand(3, 1)), expected)
    shifted = torch.ones(13)[1:].view(3, 4)
    assert program(x=shifted, scale=torch.ones(3, 1)).tolist() == [OUT] * 3


MUTATES = """
WEIGHTS = ()
def step_0(pieces, weights):
    def step(x):
        x.add_(1)
        return x, torch.is_grad_enabled()
    return step
import torch
PIECES = {"step_0": ()}
"""


def test_a_mutated_input_is_written_or_refused(artifact: Make) -> None:
    where = artifact(
        code=MUTATES,
        inputs=(Input(name="x", shape=("n", 2), dtype="float32", mutated=True),),
        weights=(),
        constants={},
        programs=(Program(range=span(1, 8), step="step_0", binaries=()),),
    )
    program = load(where)
    x = torch.zeros(2, 2, requires_grad=True)
    out, recording = program(x)
    assert out is x
    assert (x.tolist(), recording, x.grad_fn, torch.is_grad_enabled()) == ([[1.0, 1.0], [1.0, 1.0]], False, None, True)
    with pytest.raises(InputError) as info:
        program(torch.zeros(2, 2).t())
    assert info.value.message == (
        "input x has stride (1, 2) for shape (2, 2), expected a contiguous tensor because the program writes into it"
    )


def test_grad_mode_is_restored_after_an_error(artifact: Make) -> None:
    where = artifact(
        code="WEIGHTS = ()\ndef step_0(pieces, weights):\n    def step():\n        raise ValueError('inside')\n"
        "    return step\nPIECES = {'step_0': ()}\n",
        inputs=(),
        weights=(),
        constants={},
        programs=(Program(range=Range(()), step="step_0", binaries=()),),
    )
    program = load(where)
    with pytest.raises(ValueError, match="inside"):
        program()
    assert torch.is_grad_enabled()
    with torch.no_grad(), pytest.raises(ValueError, match="inside"):
        program()
    with pytest.raises(InputError, match="1 positional inputs, expected at most 0"):
        program(1)


def test_weights_that_need_gradients_record_none(compiled: Path) -> None:
    program = load(compiled).bind({"linear.weight": torch.nn.Parameter(torch.eye(4))})
    out = program(x=torch.ones(3, 4, requires_grad=True), scale=torch.ones(3, 1, requires_grad=True))
    assert (out.requires_grad, out.tolist()) == (False, [OUT] * 3)


def test_autocast_around_a_call_changes_nothing(compiled: Path) -> None:
    program = load(compiled).bind({"linear.weight": torch.full((4, 4), 1 / 3)})
    x, scale = torch.full((9, 4), 1 / 7, requires_grad=True), torch.ones(9, 1)
    plain = program(x, scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = program(x, scale)
        assert torch.is_autocast_enabled("cpu")
    assert (out.dtype, out.requires_grad, torch.equal(out, plain)) == (torch.float32, False, True)


def test_a_call_before_bind(artifact: Make) -> None:
    with pytest.raises(RunError) as info:
        load(artifact())(**good())
    assert info.value.message == "the program has no weights yet: it needs linear.weight"
    assert info.value.hint == "call program.bind(...) before the first call"


def test_sizes_of_two_dimensions(artifact: Make) -> None:
    boxes = Range((("n", 2, 2), ("m", 4, 4))), Range((("n", 1, 8), ("m", 4, 4)))
    program = load(
        artifact(
            inputs=(Input(name="x", shape=("n", "m"), dtype="float32"), Input(name="scale", shape=(), dtype="float32")),
            programs=tuple(Program(range=box, step="step_0", binaries=()) for box in boxes),
        )
    )
    assert program.sizes == ({"n": 2, "m": 4},)
    assert program.manifest.sizes == [{"n": 2, "m": 4}]


def test_explain_and_sizes(program: Any) -> None:
    assert program.sizes == (8,)
    size, low, high = (program.explain(n=n) for n in (8, 7, 40))
    assert (size.serves, size.is_size, size.step) == ("n=8", True, "step_0")
    assert str(size) == "n=8 (step_0): n = 8 is one of the compiled sizes"
    assert str(low) == "n=1..32 (step_0): n = 7 is not one of the compiled sizes (8) and lies in this range"
    assert (high.serves, high.is_size) == ("n=33..64", False)
    with pytest.raises(InputError, match="n = 100 is out of bounds"):
        program.explain(n=100)
    with pytest.raises(InputError, match="tokens is not a dimension; the program has n"):
        program.explain(tokens=1)
    with pytest.raises(InputError, match="no value for the dimension n"):
        program.explain()
    with pytest.raises(InputError, match="explain takes values by name, expected n") as info:
        program.explain(5)
    assert info.value.hint == "write explain(n=5)"
    with pytest.raises(InputError, match="n is '5', expected a whole number"):
        program.explain(n="5")
    assert repr(program).endswith("on cpu: n=8; n=1..32; n=33..64>")
