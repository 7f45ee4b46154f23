"""What people and scripts read: text on stderr, data on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fxc.cli import streams
from fxc.manifest import Manifest
from fxc.shapes import point_label

if TYPE_CHECKING:  # rich is imported where something is drawn: errors, help and JSON come without it
    from rich.console import Console

WIDE = 240
"""Columns where there is no terminal to measure: tables are not cut."""


def error(message: str, hint: str = "") -> None:
    """`fxc: error: MESSAGE`, the further lines of a message that has some (a compiler's), and `hint: ...`."""
    first, _, rest = message.strip().partition("\n")
    lines = [f"fxc: error: {first}", *(f"  {text}" for text in rest.splitlines())]
    if hint:
        lines.append(f"hint: {hint}")
    sys.stderr.write("\n".join(lines) + "\n")


def line(text: str) -> None:
    """One plain line for people."""
    sys.stderr.write(text + "\n")


def json_object(value: Any) -> None:
    """The one JSON object on stdout; `value` is plain data or a struct."""
    text = msgspec.json.encode(value).decode()
    if not text.isascii() and (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        text = json.dumps(msgspec.json.decode(text), separators=(",", ":"))
    streams.write(text + "\n")


def console() -> Console:
    """Where everything for people goes."""
    from rich.console import Console

    wide = None if sys.stderr.isatty() else WIDE
    return Console(stderr=True, width=wide, markup=False, emoji=False, highlight=False)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> None:
    """A table without rules, below an empty line and its title; columns named in `numbers` are flush right."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, show_header=any(header), header_style="dim" if title else "bold")
    for name in header:
        drawn.add_column(
            name, justify="right" if name in numbers else "left", no_wrap=name in numbers or name == "hash"
        )
    for row in rows:
        drawn.add_row(*row)
    screen = console()
    if title:
        screen.print(f"\n{title}", style="bold")
    if drawn.row_count:
        screen.print(drawn)


def size_bytes(count: int) -> str:
    """`312 B`, `1.4 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
        value /= 1000
    return f"{value:.1f} GB"


def duration(seconds: float) -> str:
    """`840 µs`, `3.1 ms`, `3.1 s`, `2 min 5 s`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def ago(seconds: float) -> str:
    """An age in its largest unit, `3 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def phases(seconds: Mapping[str, float]) -> str:
    """`trace 3.1 s, compile 12 s`."""
    return ", ".join(f"{name} {duration(took)}" for name, took in seconds.items())


def count(number: int, noun: str) -> str:
    """`1 piece`, `3 pieces`, `2 binaries`."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def shown_sizes(manifest: Manifest) -> str:
    """The sizes with a program of their own: `1 8`, `batch=1,tokens=128 batch=2,tokens=128`."""
    return " ".join(str(size) if isinstance(size, int) else point_label(size) for size in manifest.sizes)
