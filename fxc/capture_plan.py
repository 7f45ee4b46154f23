"""A small file that tells what an artifact's CUDA graphs took, for people and for the next capture."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from fxc.errors import DamagedError
from fxc.manifest import FORMAT, decode_sealed, seal
from fxc.shapes import point_label

Mode = Literal["full", "piecewise"]


class Recorded(msgspec.Struct, frozen=True):
    """A captured size."""

    size: dict[str, int]
    mode: Mode
    bytes: int
    """By which the free memory of the GPU went down; buffers that all sizes share are the first one's."""
    seconds: float


class CapturePlan(msgspec.Struct, frozen=True):
    """What the last captures on a kind of GPU took."""

    device: str
    """Name of the GPU."""
    torch: str
    graphs: tuple[Recorded, ...]

    @property
    def bytes(self) -> dict[str, int]:
        """By mode and size, `full num_tokens=8`."""
        return {f"{graph.mode} {point_label(graph.size)}": graph.bytes for graph in self.graphs}


def beside(artifact: Path) -> Path:
    """Where the file is: in the cache that the artifact lies in, or next to it. Not inside, as every file of an
    artifact has a digest."""
    if artifact.parent.name == "artifacts" and artifact.parent.parent.name == f"v{FORMAT}":
        return artifact.parent.with_name("captures") / f"{artifact.name}.json"
    return artifact.with_name(f"{artifact.name}.captures.json")


def read(file: Path) -> CapturePlan | None:
    """None where there is none, or none that can be read."""
    try:
        return decode_sealed(file.read_bytes(), CapturePlan, str(file), "")
    except (OSError, DamagedError):
        return None


def note(file: Path, device: str, torch: str, recorded: Iterable[Recorded]) -> None:
    """Put sizes into the file, in place of what it says of them; nothing where it cannot be written."""
    old = read(file)
    kept = old.graphs if old and (old.device, old.torch) == (device, torch) else ()
    graphs = {(graph.mode, tuple(graph.size.items())): graph for graph in (*kept, *recorded)}
    data = seal(msgspec.json.encode(CapturePlan(device, torch, tuple(graphs.values()))))
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{file.name}", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            Path(name).replace(file)
        except OSError:
            Path(name).unlink(missing_ok=True)
