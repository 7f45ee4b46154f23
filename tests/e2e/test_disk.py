"""A full disk, a read-only cache, a cache in odd places: one clear line and the right exit code, or no difference."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fxc
from fxc.cli.main import run
from tests.e2e.conftest import Built
from tests.e2e.world import Project

Fresh = Callable[..., Project]
Copied = Callable[[Built], Built]


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[None]:
    """A mount, for a test that is skipped where the user may not."""
    place.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", *arguments, str(place)], capture_output=True, check=False).returncode:
        pytest.skip("needs to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    with mounted(place, "--bind", str(place)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
        yield


def only_error(capfd: pytest.CaptureFixture[str]) -> str:
    """The one error of a run with -q, and its hint."""
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2, err
    assert lines[1].startswith("hint: ")
    return lines[0]


def test_full_disk_when_publishing(fresh: Fresh, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = fresh()
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4k", "tmpfs"):
        arguments = ["build", str(project.yaml), "-q", "-O0", "--cache-dir", str(tmp_path / "disk")]
        assert run(arguments) == 1
        message = only_error(capfd)
        assert message.startswith(f"fxc: error: cannot write {tmp_path}/disk/v1/artifacts/")
        assert message.endswith(": No space left on device")
        assert list((tmp_path / "disk" / "v1" / "staging").iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=1m", str(tmp_path / "disk")], check=True)
        assert run(arguments) == 0
        assert run(["verify", "--cache-dir", str(tmp_path / "disk")]) == 0


def test_full_disk_when_compiling(fresh: Fresh, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = fresh()
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        assert run(["build", str(project.yaml), "-q", "--cache-dir", str(tmp_path / "disk")]) == 1
        message = only_error(capfd)
        assert message.startswith("fxc: error: piece_0 n=1..64 does not compile: ")
        assert "No space left on device" in message


def test_file_size_limit(fresh: Fresh) -> None:
    """What a quota looks like to the program; works without the right to mount."""
    project = fresh()
    limit = (2000, 2000)
    arguments = ("build", str(project.yaml), "-q", "-O0", "--set", "model.args.width=8")
    done = project.fxc(*arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert (done.code, done.out) == (1, "")
    first, hint = done.err.splitlines()
    assert first.startswith(f"fxc: error: cannot write {project.root}/artifacts/")
    assert first.endswith(": File too large")
    assert hint.startswith("hint: ")


def test_read_only_cache(
    copied: Copied, plain: Built, fresh: Fresh, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    built = copied(plain)
    cache, yaml = built.project.cache, str(built.project.yaml)
    other = fresh("edited")
    (other.folder / "helper.py").write_text("SCALE = 2.0  # edited\n")
    with read_only(cache):
        assert run(["build", yaml, "-q", "--cache-dir", str(cache)]) == 0
        assert run(["build", str(other.yaml), "-q", "--cache-dir", str(cache)]) == 0  # traced; the same program
        assert capfd.readouterr() == (f"{plain.hash}\n" * 2, "")
        assert run(["warm", yaml, "--require-hit", "-q", "--cache-dir", str(cache)]) == 0
        assert run(["verify", "--cache-dir", str(cache)]) == 0
        assert fxc.load(yaml, cache_dir=cache).manifest.hash == plain.hash
        capfd.readouterr()
        assert run(["build", yaml, "-q", "--set", "model.args.width=8", "--cache-dir", str(cache)]) == 1
        message = only_error(capfd)
        assert message.startswith(f"fxc: error: cannot lock {cache}/v1/locks/")
        assert message.endswith(": Read-only file system")
