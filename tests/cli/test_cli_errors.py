"""Errors become exit codes in one place, in one form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fxc import errors
from fxc.cli import schema

EXIT_CODES = {
    "FxcError": 1, "BuildError": 1, "TraceError": 1, "PassError": 1, "CompileError": 1, "ProofError": 1, "RunError": 1,
    "InputError": 1, "WeightError": 1, "CacheIOError": 1, "UsageError": 2, "SpecError": 2, "CacheMissError": 3, "IncompatibleError": 4,
    "DamagedError": 5, "UntrustedError": 5,
}  # fmt: skip


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Have `fxc schema` fail."""

    def fail() -> Any:
        raise error

    monkeypatch.setattr(schema, "json_schema", fail)


def test_every_error_class_has_its_exit_code() -> None:
    classes = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert {name: getattr(cls, "exit_code", None) for name, cls in classes.items()} == EXIT_CODES


def test_arguments_that_are_not_text(fxc: Any) -> None:
    told = fxc("build", "missing\udcff.yaml", "--json")
    assert (told.code, told.json["error"]["message"]) == (2, "argument 'missing\\udcff.yaml' is not UTF-8")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_on_a_stream_of_any_encoding(encoding: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fxc", "build", "ä.yaml", "--json", "-q"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert (done.returncode, json.loads(done.stdout)["error"]["message"]) == (2, "ä.yaml does not exist")


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_exit_code_and_form(fxc: Any, monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    failing(monkeypatch, getattr(errors, name)("weight w is absent", "bind it"))
    assert fxc("schema") == (code, "", "fxc: error: weight w is absent\nhint: bind it\n")
    told = fxc("schema", "--json")
    assert told.code == code
    assert told.json == {"error": {"code": code, "kind": name, "message": "weight w is absent", "hint": "bind it"}}


def test_no_hint_no_line(fxc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errors.BuildError("it failed"))
    assert fxc("schema").err == "fxc: error: it failed\n"


def test_further_lines_of_a_message_are_indented(fxc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errors.CompileError("piece_0 at n=8: g++ failed\na.cpp:3: error\n  int x", "mend it"))
    assert fxc("schema").err == "fxc: error: piece_0 at n=8: g++ failed\n  a.cpp:3: error\n    int x\nhint: mend it\n"


def test_traceback_only_with_v(fxc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errors.BuildError("it failed"))
    assert "Traceback" not in fxc("schema").err
    told = fxc("schema", "-v")
    assert told.err.startswith("Traceback (most recent call last):")
    assert told.err.endswith("\nfxc: error: it failed\n")


def test_unexpected_exception(fxc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("division by zero\nmore"))
    expected = (
        "fxc: error: unexpected ZeroDivisionError: division by zero\nhint: this is a fault of fxc; -v shows where\n"
    )
    assert fxc("schema") == (1, "", expected)
    assert fxc("schema", "--json").json["error"]["kind"] == "ZeroDivisionError"
    assert "Traceback" in fxc("schema", "-qv").err


def test_interrupt(fxc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert fxc("schema") == (130, "", "fxc: error: interrupted\n")
    told = fxc("schema", "--json")
    assert told.code == 130
    assert told.json == {"error": {"code": 130, "kind": "Interrupted", "message": "interrupted", "hint": ""}}


def test_closed_output_is_quiet(fxc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, BrokenPipeError(32, "Broken pipe"))
    assert fxc("schema") == (1, "", "")


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("", "no command given", "`fxc --help` lists them"),
        ("biuld", "no such command 'biuld'", "did you mean 'build'?"),
        ("zzz", "no such command 'zzz'", "`fxc --help` shows what there is"),
        ("build", "missing argument 'MODEL.YAML'", "`fxc build --help` shows what there is"),
        ("build a.yaml b.yaml", "got unexpected extra argument(s) (b.yaml)", "`fxc build --help` shows what there is"),
        ("ls --jsn", "no such option: --jsn", "did you mean --json?"),
        ("warm a --rank 2 --world-size 2", "--rank 2 is outside a world of 2", "ranks are 0 to 1"),
        (
            "inspect abcd --code --graph",
            "--code, --graph, --json and --html - print different things to stdout",
            "give one of them",
        ),
        ("inspect zzzz", "'zzzz' is not a hash: expected hexadecimal digits", "`fxc ls` lists the hashes"),
    ],
)
def test_usage(fxc: Any, line: str, message: str, hint: str) -> None:
    assert fxc(*line.split()) == (2, "", f"fxc: error: {message}\nhint: {hint}\n")


@pytest.mark.parametrize("line", ["build a.yaml -O7", "build a.yaml -Ox", "build a.yaml --jobs 0", "warm a --rank -1"])
def test_values_out_of_bounds(fxc: Any, line: str) -> None:
    told = fxc(*line.split())
    assert told.code == 2
    assert told.out == ""
    assert told.err.startswith(f"fxc: error: invalid value for '{line.split()[2][:6].rstrip('7x')}")
    assert told.err.count("\n") == 2


def test_usage_under_json(fxc: Any) -> None:
    told = fxc("build", "--json")
    assert told.code == 2
    assert told.json["error"] == {
        "code": 2, "kind": "UsageError", "message": "missing argument 'MODEL.YAML'",
        "hint": "`fxc build --help` shows what there is",
    }  # fmt: skip


def test_spec_error(fxc: Any, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("model: {target: './m.py:M'}\ndevice: gpu\n")
    expected = "fxc: error: model.yaml: device: 'gpu' is not one of cpu, cuda\nhint: did you mean 'cuda'?\n"
    assert fxc("build", "model.yaml") == (2, "", expected)


def test_flags_after_a_double_dash_are_arguments(fxc: Any) -> None:
    assert fxc("inspect", "--", "--json").out == ""
