"""`fxc export` and `fxc import`: an artifact from one machine to another that has no network."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fxc import identity, machine
from fxc.cache import Artifact, Cache
from fxc.ranks import Ranks
from fxc.spec import load_spec

HASH = "abcd" + "0" * 28


def test_there_and_back(fxc: Any, artifact: Artifact) -> None:
    told = fxc("export", "abcd", "model.tar")
    assert (told.code, told.out) == (0, HASH + "\n")
    data = Path("model.tar").read_bytes()
    assert told.err.startswith("wrote model.tar: ")
    assert told.err.endswith(f"sha256 {hashlib.sha256(data).hexdigest()}\n")
    told = fxc("import", "model.tar", "--cache-dir", "other")
    assert (told.code, told.out, told.err) == (0, HASH + "\n", "imported Linear: 2 files\n")
    assert fxc("verify", HASH, "--cache-dir", "other", "-q").code == 0
    assert fxc("export", str(artifact.path), "again.tar", "-q") == (0, HASH + "\n", "")
    assert Path("again.tar").read_bytes() == data


def test_json(fxc: Any, artifact: Artifact, tmp_path: Path) -> None:
    told = fxc("export", "abcd", "model.tar", "--json", "-q").json
    data = Path("model.tar").read_bytes()
    assert told == {"hash": HASH, "file": "model.tar", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    told = fxc("import", "model.tar", "--cache-dir", "other", "--json", "-q").json
    assert told == {"hash": HASH, "path": str(tmp_path / "other/v1/artifacts" / HASH), "files": 2}


def test_errors(fxc: Any, artifact: Artifact) -> None:
    assert fxc("export", "dddd", "model.tar").code == 3
    assert fxc("export", "abcd", "absent/model.tar").code == 1
    assert fxc("import", "model.tar").code == 2
    Path("model.tar").write_bytes(b"nonsense" * 1000)
    told = fxc("import", "model.tar", "--json")
    assert (told.code, told.json["error"]["kind"]) == (5, "DamagedError")
    (artifact.path / "rank_0_0/transformed_code.py").write_text("x")
    assert fxc("export", "abcd", "model.tar").code == 5


def test_found_by_its_model_yaml(fxc: Any, artifact: Artifact, tmp_path: Path) -> None:
    """On another machine, where nothing was traced: by what the build has written into the manifest."""
    text = {"model": {"target": "./linear.py:Linear"}, "device": "cpu", "dims": {"n": {"min": 1, "max": 64}},
            "inputs": {"x": {"shape": ["n", 4], "dtype": "float32"}}, "compile": {"sizes": [8], "level": 0}}  # fmt: skip
    Path("model.yaml").write_text(json.dumps(text))
    factors = identity.direct_factors(load_spec(Path("model.yaml"), (), None), machine.probe("cpu"), Ranks())
    files: dict[str, bytes | Path] = {name: artifact.path / f"rank_0_0/{name}" for name in ("transformed_code.py", "computation_graph.py")}  # fmt: skip
    Cache.open(tmp_path / "cache").publish(artifact.manifest, "rank_0_0", files, (), direct=factors)
    assert fxc("inspect", "model.yaml", "--json").code == 3
    assert fxc("export", "abcd", "model.tar").code == 0
    assert fxc("import", "model.tar", "--cache-dir", "other").code == 0
    told = fxc("warm", "model.yaml", "--require-hit", "--json", "--cache-dir", "other")
    assert (told.code, told.json["hash"], told.json["hit"]) == (0, HASH, True)
    Path("model.yaml").write_text(json.dumps({**text, "compile": {"sizes": [8], "level": 1}}))
    assert fxc("warm", "model.yaml", "--require-hit", "--cache-dir", "other").code == 3
    shutil.rmtree("other")


@pytest.mark.parametrize("verb", ["export", "import"])
def test_help(fxc: Any, verb: str) -> None:
    assert "FILE.TAR" in fxc(verb, "--help").out
