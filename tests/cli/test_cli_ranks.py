"""`fxc warm --ranks`: several ranks of a job in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxc import ready
from fxc.cache import Artifact, Cache
from fxc.errors import CacheMissError, UsageError
from fxc.ranks import Ranks
from fxc.ready_ranks import of_artifact, of_world, parse
from tests.cli.conftest import CODE, HASH, manifest

FAILS = CODE.replace("return [x @ weight]", "raise ValueError('no such expert')")


@pytest.fixture
def two(artifact: Artifact, tmp_path: Path) -> Artifact:
    """The artifact, for both ranks of two, and for another replica of the first."""
    cache = Cache.open(tmp_path / "cache")
    for folder in ("rank_0_0", "rank_1_0", "rank_0_1"):
        files: dict[str, bytes | Path] = {"transformed_code.py": CODE.encode(), "computation_graph.py": b"# graph\n"}
        made = cache.publish(manifest(), folder, files, (), world_size=2)
    return made


def test_all_of_an_artifact(fxc: Any, two: Artifact) -> None:
    told = fxc("warm", "abcd", "--ranks", "all", "--json")
    assert told.code == 0
    result = told.json
    assert (list(result), result["ready"]) == (["ready", "ranks", "seconds"], True)
    places = [(entry["rank"], entry["world_size"], entry["dp_rank"]) for entry in result["ranks"]]
    assert places == [(0, 2, 0), (0, 2, 1), (1, 2, 0)]
    for entry in result["ranks"]:
        assert (entry["hash"], entry["hit"], entry["ready"], entry["compilations"]) == (HASH, True, True, 0)
        assert list(entry["seconds"]) == ["lookup", "verify", "load", "first_step", "capture", "total"]
        assert entry["seconds"]["first_step"] > 0
    assert result["seconds"]["total"] >= sum(entry["seconds"]["total"] for entry in result["ranks"])


def test_some_of_an_artifact(fxc: Any, two: Artifact) -> None:
    told = fxc("warm", "abcd", "--ranks", "1,0", "--dp-rank", "0", "--no-run")
    assert (told.code, told.out) == (0, HASH + "\n")
    ready = [line.partition(":")[0] for line in told.err.splitlines() if "ready" in line]
    assert ready == ["rank 0 of 2 ready", "rank 1 of 2 ready"]
    told = fxc("warm", "abcd", "--ranks", "1,2", "--json")
    assert (told.code, told.json["error"]["message"]) == (
        3, f"artifact {HASH} has no rank 2; its ranks are: rank_0_0, rank_0_1, rank_1_0",
    )  # fmt: skip


def test_an_error_names_the_rank(fxc: Any, two: Artifact, tmp_path: Path) -> None:
    files: dict[str, bytes | Path] = {"transformed_code.py": FAILS.encode(), "computation_graph.py": b"# graph\n"}
    Cache.open(tmp_path / "cache").publish(manifest(), "rank_1_0", files, (), world_size=2)
    told = fxc("warm", "abcd", "--ranks", "all", "--json")
    assert (told.code, told.json["error"]["kind"]) == (1, "RunError")
    assert told.json["error"]["message"].startswith("rank 1 of 2: the program fails on made-up inputs at n=8: no such")
    (two.path / "rank_1_0" / "computation_graph.py").write_bytes(b"# other\n")
    told = fxc("warm", "abcd", "--ranks", "all", "--no-run", "--json")
    assert (told.code, told.json["error"]["kind"]) == (5, "DamagedError")
    assert told.json["error"]["message"].startswith(f"rank 1 of 2: {two.path / 'rank_1_0' / 'computation_graph.py'} ")
    assert fxc("warm", "abcd", "--ranks", "0", "--no-run").code == 0


def test_of_a_spec(fxc: Any, two: Artifact, found: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found["hash"] = HASH
    arguments = ("warm", "model.yaml", "--require-hit", "--no-run", "--json")
    told = fxc(*arguments, "--ranks", "all", "--world-size", "2")
    assert [entry["rank"] for entry in told.json["ranks"]] == [0, 1]
    assert [entry["rank"] for entry in fxc(*arguments, "--ranks", "1", "--world-size", "2").json["ranks"]] == [1]
    told = fxc(*arguments, "--ranks", "all")
    assert (told.code, told.json["error"]["hint"]) == (2, "give the number of processes: --world-size or WORLD_SIZE")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(fxc(*arguments, "--ranks", "all").json["ranks"]) == 2
    assert fxc(*arguments, "--ranks", "2").code == 2
    assert fxc(*arguments, "--ranks", "0", "--rank", "0").code == 2


def test_each_is_a_hit_or_built(
    fxc: Any, two: Artifact, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def build(*_: Any, **options: Any) -> Artifact:
        asked.append((options["rank"], options["world_size"]))
        return two

    monkeypatch.setattr(ready, "_build", build)
    arguments = ("warm", "model.yaml", "--ranks", "all", "--world-size", "2", "--no-run", "--json")
    told = fxc(*arguments, "--require-hit")
    assert (told.code, asked) == (3, [])
    assert told.json["error"]["message"] == "rank 0 of 2: model.yaml is not built, or was changed since"
    assert [entry["built"] for entry in fxc(*arguments).json["ranks"]] == [True, True]
    assert asked == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("which", "numbers"), [("all", None), ("0", [0]), ("1,0", [1, 0]), ("3,3", [3])],
)  # fmt: skip
def test_parse(which: str, numbers: list[int] | None) -> None:
    assert parse(which) == numbers


@pytest.mark.parametrize("which", ["", "0,", "-1", "0-3", "every", "0, 1"])
def test_parse_refuses(which: str) -> None:
    with pytest.raises(UsageError, match="expected all, or numbers with commas between"):
        parse(which)


def test_places(two: Artifact) -> None:
    assert of_world(None, 2, 1) == [Ranks(0, 2, 1), Ranks(1, 2, 1)]
    assert of_artifact([0], two.manifest, None, None) == [Ranks(0, 2, 0), Ranks(0, 2, 1)]
    assert of_artifact(None, two.manifest, 2, 0) == [Ranks(0, 2, 0), Ranks(1, 2, 0)]
    with pytest.raises(CacheMissError, match="has no rank of a world of 4"):
        of_artifact(None, two.manifest, 4, None)
    with pytest.raises(CacheMissError, match="has no data-parallel rank 7"):
        of_artifact(None, two.manifest, None, 7)
