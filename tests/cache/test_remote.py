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

from fxc.cache import Artifact, Cache, Remote, Rules, Trust, contents, packs
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


@pytest.fixture(params=["packed", "alone"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How contents are stored: all in one pack, or each an object of its own."""
    if request.param == "alone":
        monkeypatch.setattr(packs, "PACK", 1)
    return request.param


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK", 1)


def push(remote: Remote, artifact: Artifact, force: bool = False) -> int:
    return remote.push(artifact, [("ab" * 16, Entry(HASH, SOURCES))], force, lambda count: None)


def pull(cache: Cache, remote: Remote, trust: Trust | None = None) -> tuple[Artifact, int]:
    moved: list[int] = []
    return cache.pull(remote, remote.manifest(HASH), trust or Trust(), moved.append), sum(moved)


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
    assert {f"packed/{digest}" for digest in files} | {f"artifacts/{HASH}/manifest.json"} <= set(found)
    assert [name.split("/")[0] for name in found] == ["artifacts"] * 2 + ["index"] + ["packed"] * len(files) + ["packs"]
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


def test_the_last_that_was_built(artifact: Artifact, remote: Remote) -> None:
    tuned, plain = Entry("c" * 32, SOURCES, "2026-01-02"), Entry("d" * 32, SOURCES, "2026-01-01")
    for order in ([tuned, plain], [plain, tuned]):
        remote.push(artifact, [("ef" * 16, entry) for entry in order], False, lambda count: None)
        assert remote.lookup("ef" * 16, lambda source: source.digest) == tuned.hash


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
def test_a_damaged_content(
    artifact: Artifact, other: Cache, faulty: Remote, tmp_path: Path, kept: str, damage: str
) -> None:
    """Nothing is published; one of another length is uploaded again, one that only `--force` sees with it."""
    push(faulty, artifact)
    file = artifact.manifest.ranks["rank_0_0"].files["rank_0_0/transformed_code.py"]
    blob = tmp_path / "remote/v1/blobs" / file.sha256
    if kept == "packed":
        (blob,) = (tmp_path / "remote/v1/packs").iterdir()
    hurt(blob, damage)
    with pytest.raises(
        DamagedError, match=f"lacks {blob.parent.name}/" if damage == "missing" else f"{blob.name} is damaged"
    ):
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
def test_pushing_in_bad_weather(
    artifact: Artifact, other: Cache, faulty: Remote, kept: str, call: str, faults: list[Any]
) -> None:
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
def test_pulling_in_bad_weather(
    artifact: Artifact, other: Cache, faulty: Remote, kept: str, call: str, faults: list[Any]
) -> None:
    push(faulty, artifact)
    FAULTS.plan(call, *faults)
    taken, moved = pull(other, faulty)
    assert not FAULTS.planned[call]
    assert (taken.verify(), moved) == (4, size(artifact))
    assert list((other.root / "incoming").iterdir()) == []


def test_given_up_and_gone_on_with(
    artifact: Artifact, other: Cache, faulty: Remote, alone: None, tmp_path: Path
) -> None:
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
    found = [path.split("/v1/")[1].split("/") for path in FAULTS.written]
    kinds = [names[0] for names in found if names[0] != "packs"]
    assert (found[0][0], kinds) == ("packs", ["packed"] * 3 + ["artifacts"] * 2 + ["index"])
    assert [names[2] for names in found if names[0] == "artifacts"] == ["packs.json", "manifest.json"]


NEW = "ef" * 16


def more(cache: Cache, artifact: Artifact) -> Artifact:
    """Another artifact, with the binary of the first and one content of its own."""
    manifest = msgspec.structs.replace(make_manifest(NEW), binaries=artifact.manifest.binaries)
    return cache.publish(manifest, "rank_0_0", {"transformed_code.py": b"y = 2\n"}, [PIECE])


def test_what_another_artifact_has_sent_is_not_sent_again(
    cache: Cache, artifact: Artifact, other: Cache, remote: Remote, kept: str
) -> None:
    push(remote, artifact)
    second = more(cache, artifact)
    assert remote.push(second, [], False, lambda count: None) == len(b"y = 2\n")
    assert remote.has(second)
    assert other.pull(remote, remote.manifest(NEW), Trust(), lambda count: None).verify() == 2
    assert pull(other, remote)[1] == size(artifact) - artifact.manifest.binaries[PIECE].bytes


def test_requests_of_a_pull(cache: Cache, other: Cache, faulty: Remote) -> None:
    """One for all that lies together, and nothing in between comes along."""
    files: dict[str, bytes | Path] = {f"{index:02}": b"%02d" % index * 500 for index in range(40)}
    push(faulty, cache.publish(make_manifest(), "rank_0_0", files, []))
    FAULTS.clear()
    assert pull(other, faulty)[1] == 40_000
    assert FAULTS.calls == {"cat_file": 3, "blob": 1}  # manifest, no signature, packs.json, and all contents
    for name in ("03", "04", "20"):
        (other.root / f"artifacts/{HASH}/rank_0_0/{name}").unlink()
    FAULTS.clear()
    assert pull(other, faulty)[1] == 3000
    assert FAULTS.calls["blob"] == 2


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_the_record_of_packs_only_saves_requests(
    artifact: Artifact, other: Cache, faulty: Remote, tmp_path: Path, damage: str
) -> None:
    push(faulty, artifact)
    hurt(tmp_path / f"remote/v1/artifacts/{HASH}/packs.json", damage)
    assert pull(other, faulty)[0].verify() == 4
    assert faulty.has(artifact)
    assert push(faulty, artifact) == 0
    assert (tmp_path / f"remote/v1/artifacts/{HASH}/packs.json").is_file()


@pytest.mark.parametrize("start", [-1, 1, 10**9])
def test_a_record_that_points_elsewhere(
    artifact: Artifact, other: Cache, faulty: Remote, tmp_path: Path, start: int
) -> None:
    push(faulty, artifact)
    path = tmp_path / f"remote/v1/artifacts/{HASH}/packs.json"
    places = packs.decode(path.read_bytes(), "")
    path.write_bytes(
        packs.encode({digest: msgspec.structs.replace(p, start=p.start + start) for digest, p in places.items()})
    )
    with pytest.raises(DamagedError, match="packs/.* is damaged"):
        pull(other, faulty)
    assert other.list() == []
    push(faulty, artifact, force=True)
    assert pull(other, faulty)[0].verify() == 4


def test_packs_are_of_a_limited_size(
    cache: Cache, other: Cache, faulty: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packs, "PACK", 2000)
    files: dict[str, bytes | Path] = {str(index): bytes([index]) * 700 for index in range(5)}
    push(faulty, cache.publish(make_manifest(), "rank_0_0", {**files, "large": b"x" * 1001, "empty": b""}, []))
    sizes = {
        folder: sorted(path.stat().st_size for path in (tmp_path / "remote/v1" / folder).iterdir())
        for folder in ("packs", "blobs")
    }
    assert sizes == {"packs": [700, 1400, 1400], "blobs": [1001]}
    assert pull(other, faulty)[0].verify() == 7


def test_leftovers_are_pruned(artifact: Artifact, other: Cache, faulty: Remote, alone: None) -> None:
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


def test_several_pull_at_once(artifact: Artifact, other: Cache, faulty: Remote, kept: str) -> None:
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
    assert FAULTS.calls["blob"] == {"packed": 1, "alone": 3}[kept]  # different contents


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
    monkeypatch.setattr(packs, "PACK", 1)
    monkeypatch.setattr(contents, "CHUNK", 1000)
    files: dict[str, bytes | Path] = {"large": bytes(range(250)) * 10, "empty": b"", "whole": b"x" * 2000}
    push(faulty, cache.publish(make_manifest(), "rank_0_0", files, []))
    FAULTS.plan("blob", None, "cut", ERROR)
    taken, moved = pull(other, faulty)
    assert (moved, taken.verify()) == (4500, 3)
    assert 5 < FAULTS.calls["blob"] <= 5 + 2 * 3  # three and two, and what was asked for again
