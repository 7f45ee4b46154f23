"""The note that binaries have run outlives what brings the same binaries without it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fxc import verified
from fxc.cache import Artifact, Cache, Remote, Trust
from fxc.manifest import Binary, Manifest, Proof

from .conftest import CODE, HASH, PIECE, make_binary, make_manifest
from .test_trust import write_keys

OTHER = b"\x7fELF, compiled once more"
TRACED = Proof(piece="step_0", shape="n=1", max_rel_err=1e-7, tolerance=1e-5)
RAN = Proof(piece="p", shape="n=1", max_rel_err=2e-7, tolerance=1e-5)


@pytest.fixture
def other(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "other", {})


def unverified(binary: Binary) -> Manifest:
    return msgspec.structs.replace(make_manifest(), binaries={PIECE: binary}, proof=(TRACED,), verified=False)


def put(cache: Cache, data: bytes, tmp_path: Path, rank: str = "rank_0_0") -> Artifact:
    """As a build without the device leaves it."""
    (tmp_path / "made.so").write_bytes(data)
    cache.store_binary(PIECE, {f"{PIECE}.so": tmp_path / "made.so"}, make_binary(data))
    return cache.publish(unverified(make_binary(data)), rank, {"transformed_code.py": CODE}, [PIECE], world_size=2)


def run(cache: Cache) -> Artifact:
    """As `verify --run` leaves it."""
    artifact = cache.artifact(HASH)
    ran = {k: msgspec.structs.replace(b, checked=True, proof=(RAN,)) for k, b in artifact.manifest.binaries.items()}
    return cache.amend(artifact, verified.note(artifact.manifest, ran))


def import_file(to: Cache, artifact: Artifact, tmp_path: Path) -> Artifact:
    to.export(artifact, tmp_path / "model.tar")
    return to.import_file(tmp_path / "model.tar", Trust())


def pull(to: Cache, artifact: Artifact, tmp_path: Path) -> Artifact:
    remote = Remote.open(f"{tmp_path}/remote")
    remote.push(artifact, [], False, lambda count: None)
    return to.pull(remote, remote.manifest(HASH), Trust(), lambda count: None)


@pytest.mark.parametrize("take", [import_file, pull])
def test_taken_in(take: Callable[..., Artifact], cache: Cache, other: Cache, tmp_path: Path) -> None:
    artifact = put(cache, b"\x7fELF", tmp_path)
    assert take(other, artifact, tmp_path).data == artifact.data
    noted = run(other).manifest
    assert (noted.verified, noted.proof, noted.binaries[PIECE].proof) == (True, (TRACED, RAN), (RAN,))
    taken = take(other, artifact, tmp_path)
    assert taken.manifest == noted == other.artifact(HASH).manifest
    assert taken.verify() == 2


@pytest.mark.parametrize("take", [import_file, pull])
def test_other_binaries_taken_in(take: Callable[..., Artifact], cache: Cache, other: Cache, tmp_path: Path) -> None:
    put(other, b"\x7fELF", tmp_path)
    assert run(other).manifest.verified
    artifact = put(cache, OTHER, tmp_path)
    taken = take(other, artifact, tmp_path)
    assert taken.data == artifact.data
    assert not taken.manifest.verified


def test_a_signed_one_is_as_it_was_signed(cache: Cache, other: Cache, tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, "key")
    put(cache, b"\x7fELF", tmp_path)
    import_file(other, cache.artifact(HASH), tmp_path)
    run(other)
    artifact = cache.sign(cache.artifact(HASH), private)
    taken = import_file(other, artifact, tmp_path)
    assert (taken.data, taken.signature) == (artifact.data, artifact.signature)


@pytest.mark.parametrize("rank", ["rank_0_0", "rank_1_0"])
def test_published_again(rank: str, cache: Cache, tmp_path: Path) -> None:
    put(cache, b"\x7fELF", tmp_path)
    noted = run(cache).manifest
    manifest = put(cache, b"\x7fELF", tmp_path, rank).manifest
    assert (manifest.verified, manifest.proof, manifest.binaries) == (True, noted.proof, noted.binaries)
    assert sorted(manifest.ranks) == sorted({"rank_0_0", rank})


def test_other_binaries_of_another_rank(cache: Cache, other: Cache, tmp_path: Path) -> None:
    """What has run on a device is not what the other rank has."""
    put(cache, b"\x7fELF", tmp_path)
    artifact = run(cache)
    put(other, OTHER, tmp_path, "rank_1_0")
    taken = import_file(other, artifact, tmp_path).manifest
    assert (sorted(taken.ranks), taken.verified) == (["rank_0_0", "rank_1_0"], False)


def test_pushed_over(cache: Cache, other: Cache, tmp_path: Path) -> None:
    artifact = put(cache, b"\x7fELF", tmp_path)
    noted = run(import_file(other, artifact, tmp_path) and other)
    remote = Remote.open(f"{tmp_path}/remote")
    remote.push(noted, [], False, lambda count: None)
    remote.push(artifact, [], True, lambda count: None)
    assert remote.manifest(HASH).manifest == noted.manifest
