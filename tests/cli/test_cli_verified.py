"""An artifact whose binaries have not run on a device of their kind: what is said of it, and how that ends."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fxc as library
from fxc import verification
from fxc.cache import Cache, Trust, binaries
from fxc.errors import CompileError, ProofError
from fxc.manifest import decode, encode
from fxc.progress import Observer

MODEL = """from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()
"""
SPEC = """model: {target: ./small.py:Small}
device: cpu
inputs: {x: {shape: [n, 8], dtype: float32}}
dims: {n: {min: 1, max: 32}}
compile: {level: 1}
"""


@pytest.fixture(scope="module")
def unverified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache with one binary, as a build without the device would have left it."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.py").write_text(MODEL)
    (folder / "model.yaml").write_text(SPEC)
    hash = library.build(folder / "model.yaml", cache_dir=folder / "cache").hash
    cache = Cache.open(folder / "cache")
    artifact = cache.artifact(hash)
    binaries = {key: msgspec.structs.replace(b, proof=()) for key, b in artifact.manifest.binaries.items()}
    program = tuple(line for line in artifact.manifest.proof if line.piece == "step_0")
    cache.amend(artifact, msgspec.structs.replace(artifact.manifest, verified=False, binaries=binaries, proof=program))
    return folder / "cache", hash


def test_before_and_after(fxc: Any, unverified: tuple[Path, str]) -> None:
    cache, hash = unverified
    place = ("--cache-dir", str(cache))
    refused = fxc("warm", hash, "--require-verified", "--json", *place)
    assert refused.code == 5
    assert refused.json["error"]["kind"] == "UntrustedError"
    assert refused.json["error"]["hint"] == f"on such a machine: fxc verify {hash[:12]} --run"
    assert fxc("warm", hash, "--no-run", "--json", *place).json["verified"] is False
    assert "not verified" in fxc("inspect", hash, *place).err
    assert "has not run on a device of its kind" in fxc("verify", hash, *place).err

    told = fxc("verify", hash, "--run", "--jobs", "1", "--json", *place)
    assert told.json["artifacts"][0]["verified"], told.err
    manifest = Cache.open(cache).artifact(hash).manifest
    (binary,) = manifest.binaries.values()
    assert {line.shape for line in binary.proof} == {"n=1", "n=2", "n=31", "n=32"}
    assert set(binary.proof) < set(manifest.proof)
    assert fxc("verify", hash, *place).code == 0
    assert fxc("warm", hash, "--no-run", "--require-verified", "--json", *place).json["verified"] is True


def test_a_binary_that_is_wrong(unverified: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with what the artifact says was traced."""
    cache, hash = unverified
    artifact = Cache.open(cache).artifact(hash)
    checked, texts = verification.read(artifact)
    other = {name: text.replace("relu", "tanh") for name, text in texts.items()}
    monkeypatch.setattr(verification, "read", lambda artifact: (checked, other))
    with pytest.raises(ProofError, match=r"piece_0 n=1..32 of artifact \w+ does not equal eager: result 0 at n=1"):
        verification.verify(artifact, Cache.open(cache), None, 1, Observer())


def test_signed_binaries_run_as_copies(
    unverified: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was checked: nobody who can write the artifact can change them."""
    cache, hash = unverified
    artifact = msgspec.structs.replace(Cache.open(cache).artifact(hash), trust=Trust(keys=(tmp_path / "key.pub",)))
    checked, texts = verification.read(artifact)
    (name,) = (name for name in artifact.manifest.ranks["rank_0_0"].files if name.endswith(".so"))
    entry = checked[Path(name).stem]
    job = verification._job(0, artifact, name, entry, texts, None, tmp_path, 1)
    assert Path(job.library) == tmp_path / "0" / Path(name).name
    assert Path(job.library).read_bytes() == (artifact.path / name).read_bytes()


def test_ranks_with_other_bytes_run_each(unverified: tuple[Path, str], tmp_path: Path) -> None:
    """Under one key, of one rank and of another."""
    cache, hash = unverified
    shutil.copytree(cache, tmp_path / "cache")
    path = Cache.open(tmp_path / "cache").artifact(hash).path
    shutil.copytree(path / "rank_0_0", path / "rank_1_0")
    (library,) = (path / "rank_0_0").glob("*/*.so")
    library.unlink()
    library.write_bytes(b"not a library")
    manifest = decode((path / "manifest.json").read_bytes(), "")
    ranks = {}
    for number, (name, rank) in enumerate((name, manifest.ranks["rank_0_0"]) for name in ("rank_0_0", "rank_1_0")):
        files = (file for file in (path / name).rglob("*") if file.is_file())
        measured = {str(file.relative_to(path)): binaries.measure(file) for file in files}
        ranks[name] = msgspec.structs.replace(rank, rank=number, world_size=2, files=measured)
    changed = msgspec.structs.replace(manifest, ranks=ranks, verified=False)
    (path / "manifest.json").write_bytes(encode(changed))
    place = Cache.open(tmp_path / "cache")
    with pytest.raises(CompileError, match="does not run"):
        verification.verify(place.artifact(hash), place, None, 1, Observer())
    assert not place.artifact(hash).manifest.verified


def test_it_names_what_it_runs(fxc: Any, tmp_path: Path) -> None:
    assert fxc("verify", "--run", "--cache-dir", str(tmp_path)).code == 2
