"""Ranks from arguments and from the environment."""

from __future__ import annotations

import pytest

from fxc.errors import UsageError
from fxc.ranks import Ranks, ranks


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
    assert ranks(*arguments) == expected


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("one", "2"), ("0", "two"), ("-1", "2")])
def test_ranks_that_make_no_sense(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError):
        ranks(None, None, None)
