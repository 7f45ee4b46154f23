"""What each verb prints where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import fxc as package
from fxc import manifest as records
from fxc.cache import Artifact
from fxc.errors import CacheMissError

CODE = "rank_0_0/transformed_code.py"


class Built(msgspec.Struct):
    hash: str
    path: str
    hit: bool
    pieces: int
    unique_pieces: int
    binaries: dict[str, int]
    sizes: list[int]
    seconds: dict[str, float]
    proof: list[dict[str, Any]]
    proved: bool
    unproved: list[Any]
    passes: list[dict[str, Any]]
    verified: bool = True


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, artifact: Artifact, found: dict[str, str]) -> dict[str, Any]:
    """Stands in for the compiler; the arguments of the last build."""
    seen: dict[str, Any] = {}

    def build(path: Path, **options: Any) -> Built:
        seen.update(options, path=path)
        observer = options["observer"]
        observer.phase("compile")
        observer.binaries(3, 1)
        observer.compiling("piece_0 n=8")
        observer.compiled("piece_0 n=8", 2.0)
        observer.phase_done("compile", 3.14)
        counts = {"compiled": 2, "reused": 1}
        seconds = {"compile": 3.14, "total": 4.0}
        return Built(artifact.manifest.hash, str(artifact.path), False, 9, 3, counts, [8], seconds, [], True, [], [])

    module = ModuleType("fxc.pipeline")
    vars(module).update(build=build)
    monkeypatch.setitem(__import__("sys").modules, "fxc.pipeline", module)
    monkeypatch.setattr(package, "pipeline", module, raising=False)
    return seen


def test_build_prints_the_hash(fxc: Any, pipeline: dict[str, Any], artifact: Artifact) -> None:
    told = fxc("build", "model.yaml")
    assert (told.code, told.out) == (0, artifact.manifest.hash + "\n")
    assert told.err.splitlines() == [
        "3 binaries, 1 in the cache",
        "compile 3.1 s",
        "built: 9 pieces, 3 unique; 2 binaries compiled, 1 reused (4.0 s)",
    ]


def test_build_quiet_and_verbose(fxc: Any, pipeline: dict[str, Any], artifact: Artifact) -> None:
    assert fxc("build", "model.yaml", "-q") == (0, artifact.manifest.hash + "\n", "")
    assert "compiled piece_0 n=8 2.0 s\n" in fxc("build", "model.yaml", "-v").err


def test_build_json(fxc: Any, pipeline: dict[str, Any], artifact: Artifact) -> None:
    told = fxc("build", "model.yaml", "--json")
    assert list(told.json) == [
        "hash", "path", "hit", "pieces", "unique_pieces", "binaries", "sizes", "seconds", "proof", "proved", "unproved", "passes", "verified",
    ]  # fmt: skip
    assert told.json["binaries"] == {"compiled": 2, "reused": 1}


def test_build_options(fxc: Any, pipeline: dict[str, Any], tmp_path: Path) -> None:
    fxc(
        "build", "model.yaml", "--set", "compile.sizes=[1]", "--set", "device=cpu", "-O3", "--jobs", "2", "--force",
        "--no-prove", "--rank", "1", "--world-size", "4", "--dp-rank", "2", "--cache-dir", str(tmp_path / "other"),
        "--tuning", "mine.json",
    )  # fmt: skip
    pipeline.pop("observer")
    assert pipeline == {
        "path": Path("model.yaml"), "overrides": ("compile.sizes=[1]", "device=cpu"), "level": 3, "jobs": 2,
        "force": True, "prove": False, "rank": 1, "world_size": 4, "dp_rank": 2, "cache_dir": tmp_path / "other",
        "remote": None, "executor": "local", "target": None, "march": None, "tuning": "mine.json",
    }  # fmt: skip


def test_build_defaults(fxc: Any, pipeline: dict[str, Any]) -> None:
    fxc("build", "model.yaml")
    pipeline.pop("observer")
    assert pipeline == {
        "path": Path("model.yaml"), "overrides": (), "level": None, "jobs": None, "force": False, "prove": True,
        "rank": None, "world_size": None, "dp_rank": None, "cache_dir": None, "remote": None,
        "executor": "local", "target": None, "march": None, "tuning": "auto",
    }  # fmt: skip


def test_inspect_json_is_the_manifest(fxc: Any, artifact: Artifact) -> None:
    told = fxc("inspect", "abcd", "--json")
    assert told.code == 0
    on_disk = json.loads((artifact.path / "manifest.json").read_bytes())
    assert {**on_disk, **told.json} == on_disk
    assert set(told.json) == set(records.Manifest.__struct_fields__)
    assert told.err == ""


def test_inspect_for_people(fxc: Any, artifact: Artifact) -> None:
    told = fxc("inspect", "abcd")
    assert (told.code, told.out) == (0, "")
    words = [" ".join(line.split()) for line in told.err.splitlines()]
    for line in (
        f"hash {artifact.manifest.hash}",
        "model Linear",
        "dims n 1..64",
        "sizes 8",
        "pieces 1: 1 compiled call of 1 unique piece",
        "created 2026-01-02T03:04:05Z",
        "seconds trace 3.1 s, total 4.0 s",
        "x float32[n, 4]",
        "weight float32[4, 4]",
        "n=1..64 step_0 0 pieces",
        "silu_mul 4 1",
        "silu_mul piece_0 n=8 add is f64",
        "0 binaries, 0 B",
        "torch 2.13.0+cpu",
        "proof: 1 check against eager, largest relative error 2.50e-07 (n=1)",
    ):
        assert line in words


def test_inspect_sources(fxc: Any, artifact: Artifact) -> None:
    assert fxc("inspect", "abcd", "--code").out == (artifact.path / CODE).read_text()
    assert fxc("inspect", "abcd", "--graph") == (0, "# the graph\n", "")


def test_inspect_a_moved_artifact(fxc: Any, artifact: Artifact, tmp_path: Path) -> None:
    shutil.move(artifact.path, tmp_path / "moved")
    assert fxc("inspect", "moved", "--json").json["hash"] == artifact.manifest.hash
    assert fxc("inspect", str(tmp_path / "moved"), "--json").code == 0


def test_unknown_hash(fxc: Any, artifact: Artifact) -> None:
    told = fxc("inspect", "dddd")
    assert told.code == 3
    assert told.err.startswith("fxc: error: no artifact dddd in ")


def test_ls(fxc: Any, artifact: Artifact) -> None:
    told = fxc("ls")
    assert (told.code, told.out) == (0, "")
    header, row = told.err.splitlines()
    assert header.split() == ["hash", "model", "sizes", "device", "bytes", "age", "last", "use"]
    assert row.split()[:4] == [artifact.manifest.hash, "Linear", "8", "cpu"]


def test_ls_json(fxc: Any, artifact: Artifact) -> None:
    (entry,) = fxc("ls", "--json").json["artifacts"]
    assert {name: entry[name] for name in ("hash", "model", "sizes", "device")} == {
        "hash": artifact.manifest.hash, "model": "Linear", "sizes": [8], "device": "cpu",
    }  # fmt: skip
    assert entry["bytes"] > 0
    assert entry["created"] <= entry["last_used"]


def test_ls_shows_a_damaged_manifest(fxc: Any, artifact: Artifact) -> None:
    (artifact.path / "manifest.json").write_text("{")
    assert "damaged" in fxc("ls").err
    assert fxc("ls", "--json").json["artifacts"][0]["model"] is None


def test_empty_cache(fxc: Any, tmp_path: Path) -> None:
    assert fxc("ls") == (0, "", f"no artifacts in {tmp_path}/cache/v1\n")
    assert fxc("ls", "-q") == (0, "", "")
    assert fxc("ls", "--json").json == {"artifacts": []}
    assert fxc("verify").code == 0
    assert not (tmp_path / "cache").exists()


def test_verify(fxc: Any, artifact: Artifact) -> None:
    hash = artifact.manifest.hash
    assert fxc("verify") == (0, "", f"{hash}  ok  2 files\n")
    assert fxc("verify", "abcd", "-q") == (0, "", "")
    entry = {"hash": hash, "path": str(artifact.path), "files": 2, "verified": True}
    assert fxc("verify", "abcd", "--json").json == {"artifacts": [entry]}


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "missing"])
def test_verify_names_the_damaged_file(fxc: Any, artifact: Artifact, damage: str) -> None:
    file = artifact.path / CODE
    data = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes({"flipped": b"?" + data[1:], "truncated": data[:-1], "empty": b""}[damage])
    for arguments in (["verify"], ["verify", "abcd"], ["warm", "abcd"], ["inspect", "abcd", "--code"]):
        told = fxc(*arguments)
        assert told.code == 5
        assert f"fxc: error: {file} " in told.err
    assert fxc("verify", "--json").json["error"]["kind"] == "DamagedError"


def test_schema(fxc: Any) -> None:
    told = fxc("schema")
    assert told.err == ""
    assert told.json["$defs"]["InputSpec"]["required"] == ["shape", "dtype"]
    assert fxc("schema", "--json").out == told.out


def test_warm_a_hash(fxc: Any, artifact: Artifact) -> None:
    told = fxc("warm", "abcd", "--json")
    assert told.code == 0
    result = told.json
    seconds = result.pop("seconds")
    assert result == {
        "hash": artifact.manifest.hash, "hit": True, "built": False, "ready": True, "sizes": [8], "graphs": {}, "graph_bytes": 0, "not_captured": "", "verified": True, "compilations": 0,
    }  # fmt: skip
    assert list(seconds) == ["lookup", "verify", "load", "first_step", "capture", "total"]
    assert seconds["first_step"] > 0
    assert seconds["capture"] == 0


def test_warm_prints_the_hash(fxc: Any, artifact: Artifact) -> None:
    told = fxc("warm", str(artifact.path))
    assert (told.code, told.out) == (0, artifact.manifest.hash + "\n")
    names = [line.split()[0] for line in told.err.splitlines()]
    assert names == ["lookup", "verify", "load", "first_step", "ready:"]
    assert fxc("warm", "abcd", "-q") == (0, artifact.manifest.hash + "\n", "")


def test_warm_without_running(fxc: Any, artifact: Artifact) -> None:
    assert fxc("warm", "abcd", "--no-run", "--json").json["seconds"]["first_step"] == 0


def test_warm_builds_on_a_miss(fxc: Any, pipeline: dict[str, Any], artifact: Artifact) -> None:
    told = fxc("warm", "model.yaml", "-O0", "--set", "device=cpu", "--jobs", "3", "--json")
    assert (told.json["hit"], told.json["built"]) == (False, True)
    assert (pipeline["level"], pipeline["overrides"], pipeline["jobs"]) == (0, ("device=cpu",), 3)


def test_warm_finds(fxc: Any, pipeline: dict[str, Any], artifact: Artifact, found: dict[str, str]) -> None:
    found["hash"] = artifact.manifest.hash
    told = fxc("warm", "model.yaml", "--require-hit", "--json")
    assert (told.json["hit"], told.json["built"]) == (True, False)
    assert "path" not in pipeline


def test_warm_requires_a_hit(fxc: Any, pipeline: dict[str, Any]) -> None:
    told = fxc("warm", "model.yaml", "--require-hit")
    assert told.code == CacheMissError.exit_code == 3
    assert told.err.splitlines()[-2:] == [
        "fxc: error: model.yaml is not built, or was changed since",
        "hint: run `fxc build model.yaml`, or name a build with options by its hash; `fxc why model.yaml` tells more",
    ]  # fmt: skip


def test_warm_refuses_overrides_of_a_hash(fxc: Any, artifact: Artifact) -> None:
    told = fxc("warm", "abcd", "-O1")
    assert told.code == 2
    assert "fxc: error: abcd is built already: --set and -O cannot change it\n" in told.err


def test_warm_another_machine(fxc: Any, artifact: Artifact) -> None:
    target = msgspec.structs.replace(artifact.manifest.target, arch="s390x")
    changed = msgspec.structs.replace(artifact.manifest, target=target)
    (artifact.path / "manifest.json").write_bytes(records.encode(changed))
    told = fxc("warm", "abcd")
    assert told.code == 4
    assert "s390x" in told.err
