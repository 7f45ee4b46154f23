"""Pushing to and pulling from fsspec file systems: local, in memory, and one that fails, stalls and cuts off."""

from __future__ import annotations

import importlib.util
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fxc.cache import Artifact, Cache, Remote, Rules, Trust
from fxc.cache.index import Entry
from fxc.cache.transfer import Patience
from fxc.cache.trust import check
from fxc.errors import CacheIOError, CacheMissError, DamagedError, IncompatibleError, UntrustedError, UsageError
from fxc.manifest import Source, encode

from .conftest import CODE, HASH, PIECE, make_binary, make_manifest
from .faulty import FAULTS
from .test_binaries import hurt
from .test_publish import tree
from .test_trust import write_keys

QUICK = Patience(tries=4, pause=0.001, stall=0.3, parallel=4)
SOURCES = (Source(file="model.py", digest="1"),)


@pytest.fixture
def artifact(cache: Cache, store: Callable[..., str]) -> Artifact:
    """Two ranks with one binary: four contents, one of them twice."""
    manifest = msgspec.structs.replace(make_manifest(), binaries={PIECE: make_binary()})
    for rank in ("rank_0_0", "rank_1_0"):
        made = cache.publish(manifest, rank, {"transformed_code.py": CODE + rank.encode()}, [store()], world_size=2)
    return made


@pytest.fixture
def other(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "other", {})


@pytest.fixture(params=["file", "memory", "folder"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    urls = {"file": f"file://{tmp_path}/remote", "memory": f"memory://{uuid.uuid4()}", "folder": f"{tmp_path}/remote"}
    return Remote.open(urls[request.param], QUICK)


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Remote]:
    FAULTS.clear()
    yield Remote.open(f"faulty://{tmp_path}/remote", QUICK)
    FAULTS.open.set()


def push(remote: Remote, artifact: Artifact, force: bool = False) -> int:
    return remote.push(artifact, [("ab" * 16, Entry(HASH, SOURCES))], force, lambda count: None)


def pull(cache: Cache, remote: Remote, trust: Trust | None = None) -> tuple[Artifact, int]:
    moved: list[int] = []
    return cache.pull(remote, HASH, trust or Trust(), moved.append), sum(moved)


def names(remote: Remote) -> list[str]:
    return sorted(path.split("/v1/")[1] for path in remote.fs.find(remote.root))


def size(artifact: Artifact) -> int:
    files = [file for rank in artifact.manifest.ranks.values() for file in rank.files.values()]
    return sum({file.sha256: file.bytes for file in files}.values())


def test_there_and_back(artifact: Artifact, other: Cache, remote: Remote) -> None:
    assert not remote.has(artifact)
    assert push(remote, artifact) == size(artifact)
    assert remote.has(artifact)
    files = {file.sha256 for rank in artifact.manifest.ranks.values() for file in rank.files.values()}
    found = names(remote)
    assert {f"blobs/{digest}" for digest in files} | {f"artifacts/{HASH}/manifest.json"} <= set(found)
    assert len(found) == len(files) + 2
    taken, moved = pull(other, remote)
    assert moved == size(artifact)
    assert (taken.manifest, taken.data) == (artifact.manifest, artifact.data)
    assert other.artifact(HASH).verify() == 4
    assert tree(taken.path) == tree(artifact.path)
    assert other.binary(PIECE) == make_binary()
    assert os.stat(taken.path / f"rank_1_0/inductor/{PIECE}.so").st_nlink == 3
    assert [*(other.root / "incoming").iterdir(), *(other.root / "staging").iterdir()] == []
    for path in other.root.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_only_what_is_missing_travels(cache: Cache, artifact: Artifact, other: Cache, remote: Remote) -> None:
    push(remote, artifact)
    assert push(remote, artifact) == 0
    assert push(remote, artifact, force=True) == size(artifact)
    pull(other, remote)
    assert pull(other, remote)[1] == 0
    other.prune(Rules(keep_latest=0))
    assert pull(other, remote)[1] == size(artifact)
    (other.root / f"artifacts/{HASH}/manifest.json").unlink()
    binary = artifact.manifest.ranks["rank_0_0"].files[f"rank_0_0/inductor/{PIECE}.so"].bytes
    assert pull(other, remote)[1] == size(artifact) - binary
    hurt(other.binary_files(PIECE)[0], "flipped")
    hurt(other.root / f"artifacts/{HASH}/rank_0_0/transformed_code.py", "flipped")
    assert pull(other, remote)[1] > binary
    assert other.artifact(HASH).verify() == 4


def test_direct_keys(artifact: Artifact, remote: Remote) -> None:
    assert remote.lookup("ab" * 16, lambda source: "1") is None
    push(remote, artifact)
    assert remote.lookup("ab" * 16, lambda source: "1") == HASH
    assert remote.lookup("ab" * 16, lambda source: "2") is None
    assert remote.lookup("cd" * 16, lambda source: "1") is None
    (name,) = [name for name in names(remote) if name.startswith("index/")]
    remote.fs.pipe_file(f"{remote.root}/{name}", b"{}")
    assert remote.lookup("ab" * 16, lambda source: "1") is None


def test_prefixes(artifact: Artifact, remote: Remote) -> None:
    with pytest.raises(CacheMissError, match=f"no artifact {HASH[:6]} in {remote.url}"):
        remote.resolve(HASH[:6])
    push(remote, artifact)
    assert remote.resolve(HASH[:6]) == HASH
    remote.fs.pipe_file(
        f"{remote.root}/artifacts/{HASH[:8]}{'0' * 24}/manifest.json", b""
    ) if "memory" in remote.url else None
    with pytest.raises(CacheMissError, match="no artifact 0000"):
        remote.resolve("0000")


def test_ranks_of_several_machines(cache: Cache, other: Cache, remote: Remote) -> None:
    for index, place in enumerate((cache, other)):
        rank = place.publish(
            make_manifest(), f"rank_{index}_0", {"transformed_code.py": b"%d" % index}, [], world_size=2
        )
        push(remote, rank)
        assert remote.has(rank)
    taken, _ = pull(cache, remote)
    assert sorted(taken.manifest.ranks) == ["rank_0_0", "rank_1_0"]
    assert taken.verify() == 2


def test_what_is_not_there(other: Cache, remote: Remote) -> None:
    with pytest.raises(CacheMissError, match=f"no artifact {HASH} in {remote.url}"):
        pull(other, remote)
    assert other.list() == []


def test_signatures_travel(cache: Cache, artifact: Artifact, other: Cache, remote: Remote, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path, "key")
    push(remote, artifact)
    trust = Trust(keys=(public,))
    with pytest.raises(UntrustedError, match="is not signed"):
        pull(other, remote, trust)
    assert other.list() == []
    signed = cache.sign(artifact, private)
    assert not remote.has(signed)
    push(remote, signed)
    assert remote.has(signed)
    assert pull(other, remote, trust)[0].signature == signed.signature
    assert check(other.artifact(HASH), trust) == pull(other, remote, trust)[0]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_blob(artifact: Artifact, other: Cache, faulty: Remote, tmp_path: Path, damage: str) -> None:
    """Nothing is published; one of another length is uploaded again, one that only `--force` sees with it."""
    push(faulty, artifact)
    blob = (
        tmp_path / "remote/v1/blobs" / artifact.manifest.ranks["rank_0_0"].files["rank_0_0/transformed_code.py"].sha256
    )
    hurt(blob, damage)
    with pytest.raises(DamagedError, match="lacks blobs/" if damage == "missing" else f"{blob.name} is damaged"):
        pull(other, faulty)
    assert other.list() == []
    push(faulty, artifact, force=damage == "flipped")
    assert pull(other, faulty)[0].verify() == 4


def test_a_damaged_manifest(artifact: Artifact, other: Cache, faulty: Remote, tmp_path: Path) -> None:
    push(faulty, artifact)
    path = tmp_path / f"remote/v1/artifacts/{HASH}/manifest.json"
    hurt(path, "truncated")
    with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
        pull(other, faulty)
    assert not faulty.has(artifact)
    path.write_bytes(encode(msgspec.structs.replace(make_manifest(), format=99)))
    with pytest.raises(IncompatibleError, match="has format 99"):
        pull(other, faulty)
    path.write_bytes(encode(make_manifest("ab" * 16)))
    with pytest.raises(DamagedError, match=f"is of artifact {'ab' * 16}"):
        pull(other, faulty)
    push(faulty, artifact)
    assert pull(other, faulty)[0].verify() == 4


ERROR = ConnectionError("reset by peer")


@pytest.mark.parametrize(
    ("call", "faults"),
    [
        ("pipe_file", [ERROR, ERROR, ERROR]),
        ("pipe_file", ["cut", "cut", "cut"]),
        ("pipe_file", ["cut and fail", "cut"]),
        ("pipe_file", ["stall"]),
        ("info", [ERROR, ERROR]),
        ("info", ["stall"]),
    ],
)
def test_pushing_in_bad_weather(artifact: Artifact, other: Cache, faulty: Remote, call: str, faults: list[Any]) -> None:
    FAULTS.plan(call, *faults)
    push(faulty, artifact)
    assert not FAULTS.planned[call]
    assert pull(other, faulty)[0].verify() == 4


@pytest.mark.parametrize(
    ("call", "faults"),
    [
        ("blob", [ERROR, ERROR, ERROR]),
        ("blob", ["cut", "cut", "cut"]),
        ("blob", ["stall", "stall"]),
        ("cat_file", [ERROR, "cut"]),
        ("cat_file", ["stall"]),
    ],
)
def test_pulling_in_bad_weather(artifact: Artifact, other: Cache, faulty: Remote, call: str, faults: list[Any]) -> None:
    push(faulty, artifact)
    FAULTS.plan(call, *faults)
    taken, moved = pull(other, faulty)
    assert not FAULTS.planned[call]
    assert (taken.verify(), moved) == (4, size(artifact))
    assert list((other.root / "incoming").iterdir()) == []


def test_given_up_and_gone_on_with(artifact: Artifact, other: Cache, faulty: Remote, tmp_path: Path) -> None:
    """What has travelled does not travel again."""
    one = msgspec.structs.replace(faulty, patience=msgspec.structs.replace(QUICK, parallel=1))
    FAULTS.plan("pipe_file", None, None, *[ERROR] * 9)  # the first call of all finds no folder
    with pytest.raises(CacheIOError, match="cannot write blobs/.* tried 4 times: reset by peer"):
        push(one, artifact)
    assert not (tmp_path / f"remote/v1/artifacts/{HASH}").exists()
    FAULTS.clear()
    sent = push(one, artifact)
    assert 0 < sent < size(artifact)
    FAULTS.plan("blob", None, *[ERROR] * 9)
    with pytest.raises(CacheIOError, match="cannot read blobs/.*reset by peer"):
        pull(other, one)
    assert other.list() == []
    assert len(list((other.root / "incoming").iterdir())) == 1
    FAULTS.clear()
    taken, moved = pull(other, one)
    assert 0 < moved < size(artifact)
    assert taken.verify() == 4


def test_the_manifest_comes_last(artifact: Artifact, faulty: Remote) -> None:
    push(faulty, artifact)
    kinds = [path.split("/v1/")[1].split("/")[0] for path in FAULTS.written]
    assert kinds == ["blobs"] * (len(kinds) - 2) + ["artifacts", "index"]


def test_leftovers_are_pruned(artifact: Artifact, other: Cache, faulty: Remote) -> None:
    push(faulty, artifact)
    one = msgspec.structs.replace(faulty, patience=msgspec.structs.replace(QUICK, parallel=1))
    FAULTS.plan("blob", None, *[ERROR] * 40)
    with pytest.raises(CacheIOError):
        pull(other, one)
    assert other.prune(Rules(), dry_run=True).staging == 1
    assert other.prune(Rules()).staging == 1
    assert list((other.root / "incoming").iterdir()) == []


def test_no_permission(artifact: Artifact, faulty: Remote) -> None:
    FAULTS.plan("info", *[PermissionError("Forbidden")] * 9)
    with pytest.raises(CacheIOError, match="Forbidden") as caught:
        push(faulty, artifact)
    assert caught.value.hint == "check the credentials"


def test_a_damaged_artifact_is_not_pushed(artifact: Artifact, faulty: Remote, tmp_path: Path) -> None:
    hurt(artifact.path / "rank_0_0/transformed_code.py", "flipped")
    with pytest.raises(DamagedError, match="transformed_code.py is damaged"):
        push(faulty, artifact)
    assert not (tmp_path / f"remote/v1/artifacts/{HASH}").exists()


def test_several_pull_at_once(artifact: Artifact, other: Cache, faulty: Remote) -> None:
    """Of one machine: the contents travel once."""
    push(faulty, artifact)
    FAULTS.clear()
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(pull(other, faulty)[0].verify())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4] * 4
    assert FAULTS.calls["blob"] == 3  # different contents


def test_addresses() -> None:
    with pytest.raises(UsageError, match="the remote cache nonsense://x cannot be opened"):
        Remote.open("nonsense://x")
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(UsageError) as caught:
            Remote.open("s3://bucket/fxc")
        assert caught.value.hint == "pip install 'fxc[s3]'"


def test_large_contents_come_in_several_requests(
    cache: Cache, other: Cache, faulty: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fxc.cache import remote

    monkeypatch.setattr(remote, "CHUNK", 1000)
    files: dict[str, bytes | Path] = {"large": bytes(range(250)) * 10, "empty": b"", "whole": b"x" * 2000}
    push(faulty, cache.publish(make_manifest(), "rank_0_0", files, []))
    FAULTS.plan("blob", None, "cut", ERROR)
    taken, moved = pull(other, faulty)
    assert (moved, taken.verify()) == (4500, 3)
    assert 5 < FAULTS.calls["blob"] <= 5 + 2 * 3  # three and two, and what was asked for again
