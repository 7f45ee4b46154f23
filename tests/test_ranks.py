"""Ranks from arguments and from the environment."""

from __future__ import annotations

import pytest

from fxc.errors import UsageError
from fxc.ranks import Ranks, ranks


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ((None, None, None), {}, Ranks(0, 1, 0)),
        ((3, 4, 1), {}, Ranks(3, 4, 1)),
        ((0, None, 2), {}, Ranks(0, 1, 2)),
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


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ((3, None, None), "rank 3 is of a world whose size is not given", "WORLD_SIZE"),
        ((-1, None, None), "rank -1 is outside a world of 1", "ranks are 0 to 0"),
        ((0, 0, None), "a world of 0 has no ranks", "1 or more"),
        ((0, 1, -1), "data-parallel rank -1 is below 0", "counted from 0"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: tuple[int | None, ...], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError) as caught:
        ranks(*arguments)
    assert (caught.value.message, hint in caught.value.hint) == (message, True)


def test_a_rank_of_the_environment_needs_its_world_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UsageError, match="rank 2 is of a world whose size is not given"):
        ranks(None, None, None)
