"""`fxc warm` of several processes at once: one builds, the others wait."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fxc import identity, machine, ready
from fxc.cache import Artifact, Cache
from fxc.ranks import Ranks
from fxc.spec import load_spec


@pytest.fixture
def name(found: dict[str, str]) -> str:
    """Of the lock that a build of model.yaml holds."""
    spec = load_spec(Path("model.yaml"), (), None)
    return f"warm.{identity.direct_key(spec, machine.probe('cpu', compiler=False), Ranks())}"


def test_waited_for(
    fxc: Any, artifact: Artifact, found: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process has built meanwhile is a hit."""
    cache = Cache.open(tmp_path / "cache")
    other = cache.lock(name)
    other.__enter__()

    def ended(seconds: float) -> None:
        found["hash"] = artifact.manifest.hash
        with suppress(RuntimeError):
            other.__exit__(None, None, None)

    monkeypatch.setattr("fxc.cache.lock.time.sleep", ended)
    told = fxc("warm", "model.yaml", "--json", "--wait", "10m")
    assert (told.code, told.json["hit"], told.json["built"]) == (0, True, False)
    assert "another process is building model.yaml: waiting for it, 600 s at most\n" in told.err


def test_not_for_ever(
    fxc: Any, artifact: Artifact, found: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "_build", lambda *_, **__: artifact)
    with Cache.open(tmp_path / "cache").lock(name):
        told = fxc("warm", "model.yaml", "--json", "--wait", "0.1s")
        assert (told.code, told.json["built"]) == (0, True)
        assert "another process is building" in told.err
        assert "another process" not in fxc("warm", "model.yaml", "--wait", "0s").err
    assert "another process" not in fxc("warm", "model.yaml").err
    assert fxc("warm", "model.yaml", "--wait", "soon").code == 2
