"""Ranks, and the digests that the direct lookup compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxc import identity, machine
from fxc.cache import key
from fxc.errors import UsageError
from fxc.identity import Ranks
from fxc.manifest import Source


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ((None, None, None), {}, Ranks(0, 1, 0)),
        ((3, None, 1), {}, Ranks(3, 4, 1)),
        ((None, None, None), {"RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 2, 0)),
        ((0, 8, None), {"RANK": "1", "WORLD_SIZE": "2"}, Ranks(0, 8, 0)),
    ],
)
def test_ranks(
    arguments: tuple[int | None, ...], environ: dict[str, str], expected: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert identity.ranks(*arguments) == expected


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("one", "2"), ("0", "two"), ("-1", "2")])
def test_ranks_that_make_no_sense(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError):
        identity.ranks(None, None, None)


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
