"""Artifacts for the tests of the loader, and a library that is compiled once per session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade import LINEAR, span, write

from fxc.manifest import Program


@pytest.fixture
def artifact(tmp_path: Path) -> Callable[..., Path]:
    """Writes an artifact below the test's folder."""

    def make(name: str = "artifact", **options: object) -> Path:
        return write(tmp_path / name, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled `x @ weight.t()` for n from 1 to 64."""
    path = tmp_path_factory.mktemp("library") / "linear.so"
    script = Path(__file__).with_name("compile_linear.py")
    subprocess.run([sys.executable, str(script), str(path)], check=True, capture_output=True)
    return path


@pytest.fixture(scope="session")
def compiled(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with two binaries: for n = 8, and for 1..64."""
    return write(
        tmp_path_factory.mktemp("compiled") / "artifact",
        code=LINEAR,
        libraries={"size": library, "general": library},
        programs=(
            Program(range=span(8, 8), step="step_0", binaries=("size",)),
            Program(range=span(1, 64), step="step_0", binaries=("general",)),
        ),
    )
