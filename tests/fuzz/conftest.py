"""One cache for all fuzzing, which every test puts back as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxc.cache import Cache

from . import world


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return world.make(tmp_path_factory.mktemp("fuzz") / "cache")


@pytest.fixture
def cache(pristine: Cache) -> Iterator[Cache]:
    kept = {path: path.read_bytes() for path in pristine.root.rglob("*") if path.is_file()}
    yield pristine
    for path in [path for path in pristine.root.rglob("*") if path.is_file() and path not in kept]:
        path.unlink()
    for path, data in kept.items():
        put(path, data)


def put(path: Path, data: bytes) -> None:
    """Change a file in place: hard links of it, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)
