"""`model.target`: files and modules, their arguments, and what is wrong with them in one line."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxc.errors import SpecError
from fxc.models import expected_ops, instantiate, resolve
from fxc.spec import parse_spec

SOURCE = '''
import torch
from torch import nn
from neighbour import SCALE

LIMIT = 3
ready = nn.Linear(2, 2)

class Net(nn.Module):
    """A layer."""
    def __init__(self, hidden: int, bias: bool = True):
        super().__init__()
        self.layer = nn.Linear(hidden, hidden, bias=bias)
    def forward(self, x, scale=SCALE):
        return self.layer(x) * scale

def make_net(**options):
    return Net(**options)

def lazy():
    import late
    return Net(late.HIDDEN)

def number():
    return 7

def broken(hidden):
    raise ValueError("hidden must be even\\nand small")

class Open(Net):
    def forward(self, **inputs):
        return self.layer(inputs["x"])

class Space:
    Inner = Net
'''


@pytest.fixture(autouse=True)
def modules_as_before() -> Iterator[None]:
    before, path = dict(sys.modules), list(sys.path)
    yield
    assert sys.path == path
    for name in set(sys.modules) - set(before):
        if not name.startswith("torch"):
            del sys.modules[name]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("SCALE = 2.0\n")
    (tmp_path / "late.py").write_text("HIDDEN = 6\n")
    return tmp_path


def make(
    directory: Path, target: str, inputs: tuple[str, ...] = ("x",), dtype: str | None = None, **args: Any
) -> nn.Module:
    model = {"target": target, "args": args, **({"dtype": dtype} if dtype else {})}
    entries = {name: {"shape": ["n", 4], "dtype": "float32"} for name in inputs}
    spec = parse_spec({"model": model, "device": "cpu", "inputs": entries, "dims": {"n": {"min": 1, "max": 8}}})
    return instantiate(resolve(spec, directory))


@pytest.mark.parametrize("target", ["./net.py:Net", "net.py:make_net", "net:Net", "net.py:Space.Inner"])
def test_class_or_factory_in_file_or_module(directory: Path, target: str) -> None:
    module = make(directory, target, hidden=4)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "layer.weight": (4, 4),
        "layer.bias": (4,),
    }
    assert expected_ops(module) == {}


def test_source_says_where_it_comes_from(directory: Path) -> None:
    def source(target: str) -> Any:
        entry = {"x": {"shape": [2, 4], "dtype": "float32"}}
        data = {"model": {"target": target, "args": {"hidden": 4}}, "device": "cpu", "inputs": entry}
        return resolve(parse_spec(data), directory)

    file = source("./net.py:Net")
    assert (file.name, file.imports, file.sources) == ("Net", ("net.py",), (directory / "net.py",))
    module = source("net:Space.Inner")
    assert (module.name, module.imports, module.sources) == ("Inner", ("net",), (directory / "net.py",))


def test_factory_may_import_a_neighbour_when_called(directory: Path) -> None:
    assert make(directory, "net.py:lazy").get_parameter("layer.weight").shape == (6, 6)


def test_source_lines_can_be_found(directory: Path) -> None:
    module = make(directory, "net.py:Net", hidden=4)
    assert "self.layer(x) * scale" in inspect.getsource(type(module).forward)
    with pytest.raises(RuntimeError) as caught:
        module(torch.zeros(1, 5))
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "return self.layer(x) * scale" in lines


def test_file_is_executed_once_until_it_or_a_neighbour_changes(directory: Path) -> None:
    first = type(make(directory, "net.py:Net", hidden=4))
    assert type(make(directory, "net.py:Net", hidden=4)) is first
    (directory / "neighbour.py").write_text("SCALE = 5.0\n")
    second = type(make(directory, "net.py:Net", hidden=4))
    assert inspect.signature(second.forward).parameters["scale"].default == 5.0
    (directory / "net.py").write_text(SOURCE.replace("* scale", "+ scale"))
    assert "self.layer(x) + scale" in inspect.getsource(type(make(directory, "net.py:Net", hidden=4)).forward)


def test_equal_names_in_two_folders_stay_apart(directory: Path) -> None:
    other = directory / "other"
    other.mkdir()
    (other / "net.py").write_text(SOURCE.replace("LIMIT = 3", "LIMIT = 4"))
    (other / "neighbour.py").write_text("SCALE = 9.0\n")
    first, second = make(directory, "net.py:Net", hidden=4), make(other, "net.py:Net", hidden=4)
    defaults = [inspect.signature(type(m).forward).parameters["scale"].default for m in (first, second)]
    assert defaults == [2.0, 9.0]
    assert type(first).__module__ == "_fxc_target_net"
    assert type(second).__module__ == "_fxc_target_net_2"


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("nets.py:Net", {}, r"nets.py does not exist", "relative to model.yaml"),
    ("no_package.models:Net", {}, r"there is no module 'no_package'", "FILE.py:NAME"),
    ("net.py:Nett", {}, r"net.py has no 'Nett'", "did you mean 'Net'?"),
    ("net.py:LIMIT", {}, r"LIMIT in net.py is an int, not callable", ""),
    ("net.py:ready", {}, r"ready in net.py is a Linear, not callable", ""),
    ("net.py:number", {}, r"number returned an int, not an nn.Module", ""),
    (
        "net.py:broken",
        {"hidden": 3},
        r"broken\(hidden=3\) raised ValueError: hidden must be even and small \(net.py:28\)",
        "",
    ),
    ("net.py:Net", {"hiden": 3}, r"model.args.hiden: Net does not take it", "did you mean 'hidden'?"),
    ("net.py:Net", {}, r"model.args: Net: missing a required argument: 'hidden'", "Net(hidden: int"),
    ("net.py:make_net", {}, r"make_net\(\) raised TypeError", ""),
]


@pytest.mark.parametrize(("target", "args", "message", "hint"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_targets(directory: Path, target: str, args: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        make(directory, target, **args)
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package\n", "bad.py needs a module that is missing: no_such_package"),
        ("def f(:\n", r"bad.py cannot be imported: SyntaxError: .*\(bad.py, line 1\)"),
        ("1 / 0\n", r"bad.py cannot be imported: ZeroDivisionError: division by zero \(bad.py:1\)"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(SpecError, match=message):
        make(tmp_path, "bad.py:Net")


def test_inputs_must_be_those_of_forward(directory: Path) -> None:
    make(directory, "net.py:Net", ("x", "scale"), hidden=4)
    make(directory, "net.py:Open", ("anything",), hidden=4)
    with pytest.raises(SpecError, match=r"inputs.scales: forward of Net does not take it") as caught:
        make(directory, "net.py:Net", ("x", "scales"), hidden=4)
    assert caught.value.hint == "did you mean 'scale'?"
    with pytest.raises(SpecError, match=r"inputs: forward of Net needs 'x'"):
        make(directory, "net.py:Net", ("scale",), hidden=4)


def test_dtype_must_be_one_of_parameters(directory: Path) -> None:
    with pytest.raises(SpecError, match=r"model.dtype: int64 is not a floating-point dtype"):
        make(directory, "net.py:Net", dtype="int64", hidden=4)
