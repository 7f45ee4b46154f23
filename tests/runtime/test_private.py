"""Binaries of signed artifacts are mapped from copies that nobody can change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import handmade
import pytest
import torch

import fxc
from fxc import _torch_run
from fxc.cache import signing
from fxc.errors import RunError
from fxc.manifest import Program
from fxc.runtime import private
from tests.cache.test_trust import write_keys


def write(path: Path, mode: str) -> None:
    with open(path, mode, buffering=0) as file:
        file.write(b"x")


def test_nobody_can_change_them() -> None:
    with private.files({"k.so": b"checked", "k.json": b"{}"}) as folder:
        assert sorted(os.listdir(folder)) == ["k.json", "k.so"]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "k.so").read_bytes() == b"checked"
        for change in ("r+b", "wb"):
            with pytest.raises(PermissionError):
                write(folder / "k.so", change)
        opened = open(folder / "k.so", "rb")  # noqa: SIM115
    assert not folder.exists()
    with opened:
        assert opened.read() == b"checked"


def test_a_system_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(RunError, match="cannot be kept where nobody can change them: Function not implemented"):
        private.files({"k.so": b""}).__enter__()


def test_a_binary_that_is_swapped_between_check_and_map(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was checked runs."""
    program = Program(range=handmade.span(1, 64), step="step_0", binaries=("k",))
    path = handmade.write(tmp_path / "artifact", code=handmade.LINEAR, libraries={"k": library}, programs=(program,))
    key, public = write_keys(tmp_path, "key")
    (path / "manifest.sig").write_bytes(signing.sign((path / "manifest.json").read_bytes(), key))
    real: Callable[..., _torch_run.Piece] = _torch_run.runner

    def runner(found: Path, device: torch.device) -> _torch_run.Piece:
        next(path.glob("*/inductor/k.so")).write_bytes(b"another")
        return real(found, device)

    monkeypatch.setattr(_torch_run, "runner", runner)
    weight, x = torch.randn(4, 4), torch.randn(5, 4)
    loaded = fxc.load(path, verify_key=public).bind({"linear.weight": weight})
    torch.testing.assert_close(loaded(x, torch.ones(5, 1)), x @ weight.t() + torch.tensor([1.0, 2.0, 3.0, 4.0]))
