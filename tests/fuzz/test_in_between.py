"""Files that are changed between the check and the use: what was checked is what is used."""

from __future__ import annotations

from pathlib import Path

import handmade
import pytest
import torch

from fxc import _torch_run
from fxc.cache import Cache, key
from fxc.errors import DamagedError
from fxc.manifest import Program
from fxc.runtime import loader

from . import world
from .conftest import put

SENTINEL = "import builtins; builtins.sentinel = True\n"


@pytest.mark.parametrize("name", ["transformed_code.py", "constants.safetensors"])
def test_a_file_that_is_read(cache: Cache, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Changed right after its digest was taken, when the name is opened no more."""
    path = world.only(cache)
    file = path / "rank_0_0" / name
    real = key.sha256

    def digest(data: bytes) -> str:
        found = real(data)
        if data == written:
            put(file, f"{SENTINEL}{world.CODE}".encode())
        return found

    written = file.read_bytes()
    monkeypatch.setattr(key, "sha256", digest)
    with world.Ran().watched(monkeypatch) as ran:
        assert world.load(path).tolist() == world.RIGHT
    assert ran == [world.CODE]
    assert file.read_bytes() != written
    assert world.outcome(lambda: world.load(path), (5,)) == "DamagedError"
    assert not hasattr(__builtins__, "sentinel")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An artifact whose one piece is a binary."""
    library = tmp_path / "piece.so"
    library.write_bytes(b"checked")
    programs = [Program(range=handmade.span(1, 8), step="step_0", binaries=("k",))]
    return handmade.write(tmp_path / "artifact", code=handmade.LINEAR, programs=programs, libraries={"k": library})


@pytest.mark.parametrize(("changes", "maps"), [(0, 1), (1, 2), (2, 3)])
def test_a_binary_that_is_replaced(bare: Path, monkeypatch: pytest.MonkeyPatch, changes: int, maps: int) -> None:
    """By an equal one, as a build does it: mapped once more, when it was checked."""
    mapped: list[int] = []

    def runner(path: Path, device: torch.device) -> _torch_run.Piece:
        mapped.append(path.stat().st_ino)
        if len(mapped) <= changes:
            path.with_name("new").write_bytes(b"checked")
            path.with_name("new").rename(path)
        return lambda tensors: [tensors[0] @ tensors[1].t()]

    monkeypatch.setattr(_torch_run, "runner", runner)
    assert world.load(bare).tolist() == world.RIGHT
    assert len(mapped) == maps


@pytest.mark.parametrize("text", [b"changed", b"changed and longer", b""])
def test_a_binary_that_is_changed(bare: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    def runner(path: Path, device: torch.device) -> _torch_run.Piece:
        path.write_bytes(text)
        return lambda tensors: tensors

    monkeypatch.setattr(_torch_run, "runner", runner)
    with pytest.raises(DamagedError, match=r"k\.so is damaged"):
        loader.load(bare)


def test_a_binary_that_is_never_the_same(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(path: Path, device: torch.device) -> _torch_run.Piece:
        path.with_name("new").write_bytes(b"checked")
        path.with_name("new").rename(path)
        return lambda tensors: tensors

    monkeypatch.setattr(_torch_run, "runner", runner)
    with pytest.raises(DamagedError, match=r"k\.so is changed while it is loaded"):
        loader.load(bare)
