from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fxc.cache import Cache
from fxc.errors import CacheIOError


def test_the_argument_wins_over_the_environment(tmp_path: Path) -> None:
    environ = {"FXC_CACHE_DIR": str(tmp_path / "environ")}
    assert Cache.open(tmp_path / "argument", environ).root == tmp_path / "argument" / "v1"
    assert Cache.open(None, environ).root == tmp_path / "environ" / "v1"


def test_the_default_is_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache.open(environ={}).root == tmp_path / "fxc" / "v1"
    assert Cache.open(environ={"FXC_CACHE_DIR": ""}).root == tmp_path / "fxc" / "v1"


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Cache.open(Path("here")).root == tmp_path / "here" / "v1"
    assert Cache.open(environ={"FXC_CACHE_DIR": "~/there"}).root == tmp_path / "home" / "there" / "v1"


def test_opening_creates_nothing(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    assert cache.list() == []
    assert cache.binary("00") is None
    assert cache.lookup("00", lambda source: None) is None
    assert list(tmp_path.iterdir()) == []


def test_modes_are_private(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "deep" / "cache")
    with cache.staging():
        pass
    assert cache.scratch("pch") == cache.root / "scratch" / "pch"
    for path in [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_older_formats_are_pruned_on_the_first_write(tmp_path: Path) -> None:
    for name in ("v0/artifacts", "v0/locks", "v2/artifacts", "v2/locks", "video"):
        (tmp_path / name).mkdir(parents=True)
    Cache.open(tmp_path).list()
    assert (tmp_path / "v0").exists()
    with Cache.open(tmp_path).lock("x"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1", "v2", "video"]


def test_what_is_not_ours_is_not_pruned(tmp_path: Path) -> None:
    (tmp_path / "v0" / "src").mkdir(parents=True)
    with Cache.open(tmp_path).lock("x"):
        pass
    assert (tmp_path / "v0" / "src").is_dir()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_place_of_the_cache(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheIOError, match=r"the cache cannot be .*: .*/file is not a directory"):
        Cache.open(tmp_path / "file" / below)


def test_a_file_in_the_place_of_a_folder_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "v1").touch()
    cache = Cache.open(tmp_path)
    with pytest.raises(CacheIOError, match=r"cannot lock .*/v1/locks/x\.lock: (Not a directory|File exists)"):
        cache.lock("x").__enter__()
    with pytest.raises(CacheIOError, match=r"cannot read .*/v1/artifacts: Not a directory"):
        cache.list()


def test_torch_is_not_imported() -> None:
    code = "import sys, fxc.cache; fxc.cache.Cache.open(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
