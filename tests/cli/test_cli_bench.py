"""`fxc bench`: options, output and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fxc.bench
from fxc.cache import Artifact
from fxc.cli.bench import read_sizes
from fxc.errors import UsageError
from tests.benched import on_cpu


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the measuring; the arguments of the last benchmark."""
    seen: dict[str, Any] = {}

    def bench(ref: str, **options: Any) -> fxc.bench.BenchResult:
        seen.update(options, ref=ref)
        observer = seen.pop("observer")
        observer.phase("num_tokens=1")
        observer.phase_done("num_tokens=1", 0.25)
        return on_cpu()

    monkeypatch.setattr(fxc.bench, "bench", bench)
    return seen


def test_defaults(fxc: Any, asked: dict[str, Any]) -> None:
    told = fxc("bench", "abcd")
    assert (told.code, told.out) == (0, "")
    assert asked == {
        "ref": "abcd", "sizes": None, "peers": (), "repeats": 20, "context": None, "cache_dir": None,
    }  # fmt: skip
    words = [" ".join(line.split()) for line in told.err.splitlines()]
    assert words == [
        "num_tokens=1 0.2 s",
        "",
        "Tiny on cpu, torch 2.13.0, 2 threads: median of 20, 11.5 MB of weights",
        "",
        "step, µs",
        "num_tokens eager compiled piecewise full spread",
        "1 3623 100 - - ±10%",
        "36 9288 5.25 - - ±10%",
        "",
        "36: no program of its own, served by num_tokens=1..64",
        "piecewise, full: CUDA graphs want a GPU, and this program runs on the CPU",
    ]
    assert fxc("bench", "abcd", "-q") == (0, "", "")


def test_options(fxc: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    fxc(
        "bench", "abcd", "--sizes", "1, 8", "--sizes", "64", "--peers", "--repeats", "3", "--context", "0",
        "--cache-dir", str(tmp_path),
    )  # fmt: skip
    assert asked == {
        "ref": "abcd", "sizes": [1, 8, 64], "peers": ["torch.compile", "reduce-overhead"], "repeats": 3, "context": 0, "cache_dir": tmp_path,
    }  # fmt: skip


def test_json(fxc: Any, asked: dict[str, Any]) -> None:
    told = fxc("bench", "abcd", "--json", "-q")
    assert told.err == ""
    assert list(told.json) == [
        "hash", "model", "device", "torch", "threads", "repeats", "context", "bandwidth", "weights", "cache", "variants",
        "graphs", "sizes",
    ]  # fmt: skip
    first = told.json["sizes"][0]
    assert list(first) == [
        "size", "tokens", "served_by", "own", "bytes_read", "roofline_us", "padding", "times", "errors", "missing",
    ]  # fmt: skip
    assert first["times"]["eager"]["step_us"] == 3623.4


def test_plot(fxc: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    assert fxc("bench", "abcd", "--plot", "chart.svg", "--json").json["model"] == "Tiny"
    assert (tmp_path / "chart.svg").read_text().startswith("<svg ")
    told = fxc("bench", "abcd", "--plot", "none/chart.svg")
    assert (told.code, told.err) == (
        2,
        "fxc: error: --plot none/chart.svg: there is no directory none\nhint: make it first\n",
    )
    (tmp_path / "folder.svg").mkdir()
    told = fxc("bench", "abcd", "--plot", "folder.svg")
    assert (told.code, told.err) == (2, "fxc: error: --plot folder.svg is a directory\nhint: name a file in it\n")
    assert fxc("bench", "abcd", "--plot", "-", "-q").out.startswith("<svg ")
    assert fxc("bench", "abcd", "--plot", "-", "--json").code == 2


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["1,8,64"], [1, 8, 64]),
        (["batch=1,tokens=8", "batch=2, tokens=4"], [{"batch": 1, "tokens": 8}, {"batch": 2, "tokens": 4}]),
    ],
)
def test_read_sizes(words: list[str], sizes: list[Any]) -> None:
    assert [*read_sizes(words)] == sizes


@pytest.mark.parametrize("word", ["", "1,", "-1", "1.5", "n=", "n=x", "1,n=2", "1 2"])
def test_words_that_are_no_sizes(word: str) -> None:
    with pytest.raises(UsageError, match="is no list of sizes") as caught:
        [*read_sizes([word])]
    assert "batch=1,tokens=128" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["dddd"], 3, "no artifact dddd in "),
        (["model.yaml"], 3, "model.yaml is not built, or was changed since"),
        (["gone.yaml"], 2, "gone.yaml does not exist"),
        (["abcd", "--sizes", "65"], 2, "size n=65: n = 65 is out of bounds: the program was built for 1 to 64"),
        (["abcd", "--sizes", "m=3"], 2, "size m=3 is none of this program"),
        (["abcd", "--sizes", "eight"], 2, "--sizes 'eight' is no list of sizes"),
        (["abcd", "--context", "8"], 2, "--context: Linear was built without kv_cache"),
        (["abcd", "--repeats", "0"], 2, "invalid value for '--repeats'"),
        (["abcd"], 1, "computation_graph.py does not say which weight is which"),
    ],
)
def test_errors(
    fxc: Any, artifact: Artifact, found: dict[str, str], arguments: list[str], code: int, message: str
) -> None:
    told = fxc("bench", *arguments)
    assert (told.code, told.out) == (code, "")
    assert message in told.err.splitlines()[0]
    assert fxc("bench", *arguments, "--json").json["error"]["code"] == code
