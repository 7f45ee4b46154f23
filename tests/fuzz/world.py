"""A cache with a loadable artifact of hand-written code, and what may come of reading it after something was changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import handmade
import msgspec
import torch

from fxc import capture_plan
from fxc.cache import Cache
from fxc.capture_plan import Recorded
from fxc.errors import FxcError
from fxc.manifest import Binary, Manifest, Source, decode
from fxc.runtime import loader
from tests.cache.conftest import LIBRARY, PIECE, make_binary

SOURCES = (Source(file="tiny.py", digest="1"), Source(file="helper.py", digest="2"))
DIRECT = "d" * 32
CODE = f"{handmade.LINEAR}{handmade.PIECES}"


class Ran(list[str]):
    """Texts of stitched programs that were executed."""

    @contextmanager
    def watched(self, monkeypatch: Any) -> Iterator[Ran]:
        def spy(text: bytes, name: str, mode: str) -> Any:
            self.append(text.decode("utf-8", "replace"))
            return compile(text, name, mode)

        with monkeypatch.context() as patched:
            patched.setattr(loader, "compile", spy, raising=False)
            yield self


def make(folder: Path) -> Cache:
    """A cache with one artifact, its binary (which no program calls), an index entry and a note of captures."""
    cache = Cache.open(folder, {})
    written = handmade.write(folder.with_name(f"{folder.name}.handmade"), code=CODE)
    manifest = decode((written / "manifest.json").read_bytes(), "")
    source = folder.with_name(f"{folder.name}.so")
    source.write_bytes(LIBRARY)
    cache.store_binary(PIECE, {f"{PIECE}.so": source}, make_binary())
    rank = written / "rank_0_0"
    files: dict[str, bytes | Path] = {
        name: (rank / name).read_bytes() for name in ("transformed_code.py", "constants.safetensors")
    }
    files["computation_graph.py"] = b"# the graph\n"
    binaries: dict[str, Binary] = {PIECE: make_binary()}
    made = cache.publish(msgspec.structs.replace(manifest, binaries=binaries), "rank_0_0", files, [PIECE])
    cache.remember(DIRECT, made.manifest.hash, SOURCES)
    graphs = [Recorded({"n": 8}, "full", 100, 0.5)]
    capture_plan.note(capture_plan.beside(made.path), "GPU", "2.13", graphs)
    shutil.rmtree(written)
    return cache


def only(cache: Cache) -> Path:
    """The artifact."""
    (path,) = (cache.root / "artifacts").iterdir()
    return path


def load(path: Path) -> torch.Tensor:
    """Load, bind and call: a row of what the artifact computes."""
    program = loader.load(path)
    program.bind({"linear.weight": torch.eye(4)})
    result: torch.Tensor = program(torch.ones(1, 4), torch.ones(1, 1))
    return result


RIGHT = [[2.0, 3.0, 4.0, 5.0]]


def outcome(action: Callable[[], object], codes: tuple[int, ...], also: type[FxcError] | tuple[()] = ()) -> str:
    """What came of it: its answer, or the class of an error, one of `also` or with one of the exit codes."""
    try:
        return repr(action())
    except FxcError as error:
        if "\n" in error.message or not (error.exit_code in codes or isinstance(error, also)):
            raise
        return type(error).__name__


def sealed(text: str) -> bytes:
    """As `fxc.manifest.seal`, around any text, as a liar would."""
    rest = text.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(rest).hexdigest()
    return b'{\n "sha256": "%s",' % digest.encode() + rest[1:]


def opened(data: bytes) -> Any:
    """The JSON value in a sealed file."""
    value = json.loads(data)
    del value["sha256"]
    return value


def manifest_of(cache: Cache) -> Manifest:
    return cache.artifact(only(cache).name).manifest
