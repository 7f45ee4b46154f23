"""Two models, each built once for all tests: one piece without custom ops, and three pieces with custom ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e import world
from tests.e2e.world import Project


class Built(NamedTuple):
    project: Project
    hash: str
    seconds: float

    @property
    def artifact(self) -> Path:
        return self.project.artifact(self.hash)


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built first, with compiler headers, which make what the others compile quick."""
    folder = tmp_path_factory.mktemp("e2e")
    project = world.mixed(folder / "mixed", folder / "cache")
    result = project.build("--jobs", "2")
    assert result["binaries"] == {"compiled": 3, "reused": 0}
    return Built(project, result["hash"], result["seconds"]["total"])


@pytest.fixture(scope="session")
def plain(mixed: Built) -> Built:
    project = world.plain(mixed.project.folder.with_name("plain"), mixed.project.cache)
    result = project.build()
    assert result["binaries"] == {"compiled": 1, "reused": 0}
    return Built(project, result["hash"], result["seconds"]["total"])


@pytest.fixture
def fresh(mixed: Built, tmp_path: Path) -> Callable[..., Project]:
    """Makes the plain project with an empty cache, in which only the compiler's headers are."""

    def make(name: str = "project", cache: str = "cache") -> Project:
        return world.plain(tmp_path / name, world.copy_cache(mixed.project.cache, tmp_path / cache, scratch=True))

    return make


@pytest.fixture
def copied(plain: Built, mixed: Built, tmp_path: Path) -> Callable[[Built], Built]:
    """Makes a copy of a built project's cache, with which a test can do what it likes."""

    def copy(built: Built) -> Built:
        cache = world.copy_cache(built.project.cache, tmp_path / "copied")
        return built._replace(project=built.project._replace(cache=cache))

    return copy
