"""Progress of a build: live on a terminal, plain lines elsewhere, nothing with `-q`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fxc.cli import render
from fxc.progress import Observer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def observer(*, quiet: bool, verbose: bool) -> Iterator[Observer]:
    """The observer for this stderr; what it drew live is gone after, whatever happened."""
    if quiet:
        yield Observer()
    elif not sys.stderr.isatty():
        yield Lines(verbose)
    else:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=render.console(), transient=True) as progress:
            yield Live(progress, verbose)


class Lines(Observer):
    """A line when a phase is done, and with `-v` when a binary is."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose

    def phase_done(self, name: str, seconds: float) -> None:
        render.line(f"{name} {render.duration(seconds)}")

    def note(self, text: str) -> None:
        render.line(text)

    def binaries(self, total: int, reused: int) -> None:
        render.line(f"{render.count(total, 'binary')}, {reused} in the cache")

    def compiled(self, label: str, seconds: float) -> None:
        if self.verbose:
            render.line(f"compiled {label} {render.duration(seconds)}")


class Live(Observer):
    """A live line for the running phase and one for each binary being compiled; done phases stay above."""

    def __init__(self, progress: Progress, verbose: bool) -> None:
        self.progress = progress
        self.verbose = verbose
        self.running: dict[str, TaskID] = {}
        self.remaining = 0
        self.done = 0
        self.bytes = 0
        self.moved = 0

    def phase(self, name: str) -> None:
        self.running[name] = self.progress.add_task(name, total=None)

    def phase_done(self, name: str, seconds: float) -> None:
        self._finish(name)
        self.progress.console.print(f"{name:<11}{render.duration(seconds):>9}")

    def note(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def transfer(self, total: int) -> None:
        self.bytes, self.moved = total, 0
        self.transferred(0)

    def transferred(self, count: int) -> None:
        self.moved += count
        for name in ("pull", "push"):
            if (task := self.running.get(name)) is not None:
                drawn = f"{name} {render.size_bytes(self.moved)} of {render.size_bytes(self.bytes)}"
                self.progress.update(task, total=self.bytes, completed=self.moved, description=drawn)

    def binaries(self, total: int, reused: int) -> None:
        self.remaining, self.done = total - reused, 0
        self._count(reused)

    def compiling(self, label: str) -> None:
        self.running[f"  {label}"] = self.progress.add_task(f"  {label}", total=None)

    def compiled(self, label: str, seconds: float) -> None:
        self._finish(f"  {label}")
        self.done += 1
        self._count()
        if self.verbose:
            self.progress.console.print(f"  {label} {render.duration(seconds)}")

    def _finish(self, name: str) -> None:
        if (task := self.running.pop(name, None)) is not None:
            self.progress.remove_task(task)

    def _count(self, reused: int = 0) -> None:
        if (task := self.running.get("compile")) is not None:
            kept = f", {reused} in the cache" if reused else ""
            self.progress.update(task, description=f"compile {self.done} of {self.remaining}{kept}")
