"""The digests that the direct lookup compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxc import identity, machine
from fxc.cache import key
from fxc.manifest import Source


def test_sources_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALE", raising=False)
    (absent,) = identity.sources([], ["SCALE"], tmp_path)
    assert (absent.file, identity.digest_of(absent, tmp_path)) == ("env:SCALE", absent.digest)
    monkeypatch.setenv("SCALE", "")
    assert identity.digest_of(absent, tmp_path) != absent.digest


def test_another_compiler_is_another_build_and_none_is_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Source(file="compiler:", digest=key.digest("g++ 12.2.0"))
    for version, same in [("g++ 12.2.0", True), ("g++ 13.1.0", False), ("", True)]:
        monkeypatch.setattr(machine, "compiler_version", lambda version=version: version)
        assert (identity.digest_of(built, tmp_path) == built.digest) == same
