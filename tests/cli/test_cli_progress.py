"""Which observer draws where."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from fxc.cli import progress, render


def test_quiet_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.observer(quiet=True, verbose=False) as observer:
        drive(observer)
    assert capsys.readouterr().err == ""


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.observer(quiet=False, verbose=False) as observer:
        drive(observer)
    assert capsys.readouterr().err == "2 binaries, 1 in the cache\ncompile 3.1 s\n"


def test_live_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, markup=False, emoji=False, highlight=False)
    monkeypatch.setattr(render, "console", lambda: console)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.observer(quiet=False, verbose=True) as observer:
        observer.phase("compile")
        observer.binaries(2, 1)
        observer.compiling("piece_0 n=[8]")
        assert isinstance(observer, progress.Live)
        shown = [task.description for task in observer.progress.tasks]
        assert shown == ["compile 0 of 1, 1 in the cache", "  piece_0 n=[8]"]
        observer.compiled("piece_0 n=[8]", 2.5)
        assert [task.description for task in observer.progress.tasks] == ["compile 1 of 1"]
        observer.phase_done("compile", 3.14)
        assert observer.progress.tasks == []
    assert "  piece_0 n=[8] 2.5 s" in stream.getvalue()
    assert "compile        3.1 s" in stream.getvalue()


def drive(observer: Any) -> None:
    observer.phase("compile")
    observer.binaries(2, 1)
    observer.compiling("piece_0 n=8")
    observer.compiled("piece_0 n=8", 2.5)
    observer.phase_done("compile", 3.14)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2e-6, "2 µs"), (0.0031, "3.1 ms"), (0.1, "0.1 s"), (3.14, "3.1 s"), (125, "2 min 5 s")]
)
def test_duration(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(312, "312 B"), (1400, "1.4 kB"), (312_000, "312 kB"), (5e9, "5.0 GB")])
def test_size_bytes(count: int, text: str) -> None:
    assert render.size_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (61, "1 min"), (7300, "2 h"), (200_000, "2 d")])
def test_ago(seconds: float, text: str) -> None:
    assert render.ago(seconds) == text
