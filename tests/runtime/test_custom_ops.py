"""Ops of users: found or named, and the first call of one imports neither Dynamo nor Inductor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade import span
from test_loader import NO_HEAVY, child

from fxc import _torch_run
from fxc.errors import IncompatibleError, RunError
from fxc.manifest import CustomOp, Input, Program
from fxc.runtime import load

Make = Callable[..., Path]

OP = """
import torch
from neighbour import FACTOR

@torch.library.custom_op("fxcrun::double", mutates_args={"count"})
def double(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    count.add_(1)
    return x * FACTOR

@double.register_kernel("cpu")
def _(x, count):
    count.add_(1)
    return x * FACTOR

@double.register_fake
def _(x, count):
    return torch.empty_like(x)
"""
CODE = """
import torch
WEIGHTS = ()
def step_0(pieces, weights):
    double = torch.ops.fxcrun.double.default
    def step(x, count):
        return double(x, count)
    return step
PIECES = {"step_0": ()}
"""


@pytest.fixture
def calls_an_op(artifact: Make, tmp_path: Path) -> Path:
    (tmp_path / "ops.py").write_text(OP)
    (tmp_path / "neighbour.py").write_text("FACTOR = 2\n")
    return artifact(
        code=CODE,
        inputs=(
            Input(name="x", shape=("n",), dtype="float32"),
            Input(name="count", shape=(), dtype="int64", mutated=True),
        ),
        weights=(),
        constants={},
        programs=(Program(range=span(1, 8), step="step_0", binaries=()),),
        custom_ops=(CustomOp(name="fxcrun::double", module="ops.py"),),
    )


USE = """
import sys, torch, fxc.runtime
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import ops
program = fxc.runtime.load(sys.argv[1])
count = torch.tensor(0)
print([program(torch.ones(n), count).tolist() for n in (1, 2)], count.item())
"""


def test_the_first_call_imports_nothing(calls_an_op: Path, tmp_path: Path) -> None:
    assert child(USE + NO_HEAVY, str(calls_an_op), str(tmp_path)) == "[[2.0], [2.0, 2.0]] 2\n"


def test_dynamo_imported_later_finds_the_op_as_torch_made_it(calls_an_op: Path, tmp_path: Path) -> None:
    code = """
import torch._dynamo
print(program(torch.ones(1), count).tolist(), torch.compile(ops.double, backend="eager")(torch.ones(1), count).tolist())
kernel = ops.double._backend_fns["cpu"].__wrapped__
print(getattr(kernel, "__dynamo_disable").__module__ != "fxc._torch_run")
"""
    out = child(USE + code, str(calls_an_op), str(tmp_path))
    assert out.splitlines()[1:] == ["[2.0] [2.0]", "True"]


def test_a_kernel_that_cannot_be_reached_imports_dynamo_at_load(calls_an_op: Path, tmp_path: Path) -> None:
    code = USE.replace(
        "program = fxc", "import fxc._torch_run\nfxc._torch_run._MARK = 'renamed'\nprogram = fxc"
    ).replace("count =", "print('torch._dynamo' in sys.modules)\ncount =")
    assert child(code, str(calls_an_op), str(tmp_path)).splitlines()[0] == "True"


def test_an_op_that_nothing_registered(calls_an_op: Path) -> None:
    with pytest.raises(RunError) as info:
        load(calls_an_op)
    assert info.value.message == (
        "the program calls the op fxcrun::double, which is not registered; ops.py registers it"
    )
    assert info.value.hint == "import ops.py before fxc.load, or load by the path of its model.yaml"


def test_the_file_beside_model_yaml_is_run(calls_an_op: Path, tmp_path: Path) -> None:
    code = f"""
import sys, torch
from pathlib import Path
from fxc.manifest import CustomOp
from fxc.runtime import custom_ops
custom_ops.prepare([CustomOp(name="fxcrun::double", module="ops.py")], Path(sys.argv[1]))
print(torch.ops.fxcrun.double(torch.ones(1), torch.tensor(0)).tolist())
{NO_HEAVY}
from fxc.models.files import load_file
print(load_file(Path(sys.argv[1]) / "ops.py") is sys.modules["_fxc_target_ops"])  # a build takes the same
"""
    assert child(code, str(tmp_path)) == "[2.0]\nTrue\n"
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".py") == ["neighbour.py", "ops.py"]


def test_modules_that_do_not_help(artifact: Make) -> None:
    missing = artifact("a", custom_ops=(CustomOp(name="fxcrun::absent", module="fxc_no_such_module"),))
    with pytest.raises(
        RunError, match="and fxc_no_such_module, which registers it, cannot be imported: ModuleNotFoundError"
    ):
        load(missing)
    unknown = artifact("c", custom_ops=(CustomOp(name="fxcrun::absent", module=""),))
    with pytest.raises(RunError, match="is not registered; the module that defines it registers it"):
        load(unknown)
    wrong = artifact("b", custom_ops=(CustomOp(name="fxcrun::absent", module="json"),))
    with pytest.raises(RunError, match="importing json does not register the op fxcrun::absent"):
        load(wrong)


def test_the_private_names_are_there() -> None:
    """Fails when a torch release drops a name that fxc runs with."""
    assert [name for name in _torch_run.NAMES if _torch_run.find(name) is None] == []


def test_a_private_name_that_is_gone() -> None:
    with pytest.raises(IncompatibleError, match=r"^torch 2\.\S+ has no torch\._C\._aoti\.Gone, which fxc needs"):
        _torch_run.require("torch._C._aoti.Gone")


def test_importing_the_runtime_imports_nothing_heavy() -> None:
    assert (
        subprocess.run([sys.executable, "-c", "import fxc.runtime\n" + NO_HEAVY], check=True, cwd="/").returncode == 0
    )
