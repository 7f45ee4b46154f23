"""Artifacts as one file: the same bytes each time, and nothing that was altered gets in."""

from __future__ import annotations

import io
import os
import random
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fxc.cache import Artifact, Cache, Rules, Trust
from fxc.errors import CacheIOError, DamagedError, IncompatibleError, UsageError
from fxc.manifest import encode, seal

from .conftest import CODE, HASH, PIECE, make_binary, make_manifest
from .test_binaries import hurt
from .test_publish import tree
from .test_trust import write_keys

Member = tuple[tarfile.TarInfo, bytes]
CODE_0, LIBRARY_0, LIBRARY_1 = (f"{HASH}/rank_0_0/transformed_code.py", f"{HASH}/rank_0_0/inductor/{PIECE}.so", f"{HASH}/rank_1_0/inductor/{PIECE}.so")  # fmt: skip


@pytest.fixture
def artifact(cache: Cache, store: Callable[..., str]) -> Artifact:
    """Two ranks with one binary."""
    manifest = msgspec.structs.replace(make_manifest(), binaries={PIECE: make_binary()})
    for rank in ("rank_0_0", "rank_1_0"):
        made = cache.publish(manifest, rank, {"transformed_code.py": CODE + rank.encode()}, [store()], world_size=2)
    return made


@pytest.fixture
def file(cache: Cache, artifact: Artifact, tmp_path: Path) -> Path:
    cache.export(artifact, tmp_path / "model.tar")
    return tmp_path / "model.tar"


@pytest.fixture
def other(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "other", {})


def take(cache: Cache, file: Path) -> Artifact:
    return cache.import_file(file, Trust())


def members(file: Path) -> list[Member]:
    with tarfile.open(file) as tar:
        return [(info, tar.extractfile(info).read() if info.isreg() else b"") for info in tar]


def write(file: Path, content: list[Member], **options: Any) -> Path:
    with tarfile.open(file, "w", **options) as tar:
        for info, data in content:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file


def named(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, data


def is_empty(cache: Cache) -> bool:
    found = [tree(cache.root / name) for name in ("artifacts", "binaries", "index", "staging")]
    return not any(found) and cache.list() == []


def test_there_and_back(cache: Cache, artifact: Artifact, file: Path, other: Cache) -> None:
    taken = take(other, file)
    assert (taken.path, taken.manifest) == (other.root / "artifacts" / HASH, artifact.manifest)
    assert taken.data == artifact.data == (taken.path / "manifest.json").read_bytes()
    assert other.artifact(HASH).verify() == 4
    assert tree(taken.path) == tree(artifact.path)
    assert other.binary(PIECE) == make_binary()
    assert os.stat(taken.path / "rank_1_0" / "inductor" / f"{PIECE}.so").st_nlink == 3
    assert list((other.root / "staging").iterdir()) == []
    for path in other.root.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_same_bytes(cache: Cache, artifact: Artifact, file: Path, other: Cache, tmp_path: Path) -> None:
    first = file.read_bytes()
    time.sleep(1.1)  # times in a tar are whole seconds
    taken = take(other, file)
    for linked in taken.path.rglob("*.so"):  # a file system without links
        data = linked.read_bytes()
        linked.unlink()
        linked.write_bytes(data)
        linked.chmod(0o640)
    written = other.export(taken, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == first
    assert written.bytes == len(first)
    assert cache.export(artifact, file) == written
    assert sorted(path.name for path in tmp_path.glob("*.tar*")) == ["again.tar", "model.tar"]


def test_what_is_in_it(file: Path) -> None:
    content = members(file)
    assert [info.name for info, _ in content] == [
        f"{HASH}/manifest.json", LIBRARY_0, CODE_0, LIBRARY_1, f"{HASH}/rank_1_0/transformed_code.py",
    ]  # fmt: skip
    assert {(info.mode, info.uid, info.gid, info.uname, info.mtime) for info, _ in content} == {(0o644, 0, 0, "", 0)}
    assert content[3][0].linkname == LIBRARY_0


def test_unpacked_by_hand(file: Path, other: Cache) -> None:
    """As a layer of an image does it."""
    other.layout.prepare()
    with tarfile.open(file) as tar:
        tar.extractall(other.layout.artifacts, filter="data")
    assert other.artifact(HASH).verify() == 4


def test_packed_by_hand(artifact: Artifact, other: Cache, tmp_path: Path) -> None:
    """With folders, in any order, other formats."""
    with tarfile.open(tmp_path / "hand.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(artifact.path, HASH)
    assert take(other, tmp_path / "hand.tar").verify() == 4
    content = [member for member in reversed(members(tmp_path / "hand.tar")) if not member[0].isdir()]
    assert take(other, write(tmp_path / "reversed.tar", content)).verify() == 4


def test_a_signature_stays_where_the_same_comes_without(file: Path, other: Cache, tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, "key")
    other.import_file(file, Trust())
    signed = other.sign(other.artifact(HASH), private)
    assert other.import_file(file, Trust()).signature == signed.signature != b""
    assert other.artifact(HASH).signature == signed.signature


def test_ranks_that_are_there_stay(file: Path, artifact: Artifact, other: Cache) -> None:
    manifest = msgspec.structs.replace(make_manifest(), binaries=artifact.manifest.binaries)
    other.publish(manifest, "rank_2_0", {"transformed_code.py": CODE}, [], world_size=3)
    other.publish(manifest, "rank_0_0", {"old.py": CODE}, [])
    taken = take(other, file)
    assert sorted(taken.manifest.ranks) == ["rank_0_0", "rank_1_0", "rank_2_0"]
    assert taken.verify() == 5
    assert not (taken.path / "rank_0_0/old.py").exists()


def test_ranks_with_other_binaries_go(file: Path, other: Cache) -> None:
    """As of a build for a device that was not there, whose pieces were compiled with other options."""
    other.publish(make_manifest(), "rank_2_0", {"transformed_code.py": CODE}, [], world_size=3)
    assert sorted(take(other, file).manifest.ranks) == ["rank_0_0", "rank_1_0"]


def test_a_damaged_artifact_is_not_exported(cache: Cache, artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "model.tar").write_text("before")
    hurt(artifact.path / "rank_1_0/transformed_code.py", "flipped")
    with pytest.raises(DamagedError, match="rank_1_0/transformed_code.py is damaged"):
        cache.export(artifact, tmp_path / "model.tar")
    assert (tmp_path / "model.tar").read_text() == "before"
    assert len(list(tmp_path.glob("*model.tar*"))) == 1


def test_files_that_cannot_be(cache: Cache, artifact: Artifact, other: Cache, tmp_path: Path) -> None:
    with pytest.raises(CacheIOError, match="cannot write .*absent/model.tar: No such file or directory"):
        cache.export(artifact, tmp_path / "absent" / "model.tar")
    for name in (tmp_path / "absent.tar", tmp_path):
        with pytest.raises(UsageError, match="is not a file"):
            take(other, name)


def test_only_files_are_replaced(cache: Cache, artifact: Artifact, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="is not a regular file"):
            cache.export(artifact, path)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link.tar").symlink_to("model.tar")
    cache.export(artifact, tmp_path / "link.tar")
    assert (tmp_path / "link.tar").is_symlink()
    assert (tmp_path / "model.tar").is_file()


WRONG: dict[str, tuple[Callable[[list[Member]], list[Member]], str]] = {
    "missing": (lambda content: content[:-1], "lacks rank_1_0/transformed_code.py"),
    "no manifest": (lambda content: content[1:], "holds no manifest.json"),
    "empty": (lambda content: [], "holds 0 folders"),
    "twice": (lambda content: [*content, content[2]], "twice"),
    "altered": (lambda c: [*c[:2], named(CODE_0, c[2][1][::-1]), *c[3:]], "transformed_code.py is damaged"),
    "longer": (lambda c: [*c[:2], named(CODE_0, c[2][1] + b"x"), *c[3:]], "bytes, expected"),
    "unlisted": (lambda content: [*content, named(f"{HASH}/rank_0_0/inductor/{PIECE}.json", b"{}")], "does not list"),
    "unlisted at the top": (lambda content: [*content, named(f"{HASH}/evil.py", b"")], "does not list"),
    "two artifacts": (lambda content: [*content, named("abcd/manifest.json", b"")], "holds 2 folders"),
    "dots": (lambda content: [*content, named(f"{HASH}/../../evil", b"")], r"holds '.*\.\./evil'"),
    "absolute": (lambda content: [*content, named("/etc/evil", b"")], "holds '/etc/evil'"),
    "symbolic link": (lambda c: [*c[:2], named(CODE_0, kind=tarfile.SYMTYPE, link="/etc/passwd"), *c[3:]], "neither a file nor"),
    "device": (lambda content: [*content, named(f"{HASH}/x", kind=tarfile.CHRTYPE)], "neither a file nor"),
    "fifo": (lambda c: [*c[:2], named(CODE_0, kind=tarfile.FIFOTYPE), *c[3:]], "neither a file nor"),
    "hard link out": (lambda c: [*c[:2], named(CODE_0, kind=tarfile.LNKTYPE, link="/etc/passwd"), *c[3:]], "not the same file"),
    "link to another file": (lambda c: [*c[:2], named(CODE_0, kind=tarfile.LNKTYPE, link=LIBRARY_0), *c[3:]], "not the same file"),
    "link to itself": (lambda c: [*c[:3], named(LIBRARY_1, kind=tarfile.LNKTYPE, link=LIBRARY_1), *c[4:]], "not the same file"),
    "folder for a file": (lambda c: [*c[:2], named(CODE_0, kind=tarfile.DIRTYPE), *c[3:]], "lacks rank_0_0/transformed_code.py"),
    "another name": (lambda content: [named(info.name.replace(HASH, "ab" * 16), data, info.type, info.linkname.replace(HASH, "ab" * 16))
                                      for info, data in content], "its manifest is of"),
    "manifest": (lambda c: [named(c[0][0].name, c[0][1].replace(b"Tiny", b"Evil")), *c[1:]], "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_archives(file: Path, other: Cache, name: str) -> None:
    change, message = WRONG[name]
    write(file, change(members(file)))
    with pytest.raises(DamagedError, match=message):
        take(other, file)
    assert is_empty(other)


LISTS: dict[str, dict[str, Any]] = {
    "dots": {"name": "rank_0_0/../../../evil"},
    "absolute": {"name": "/evil"},
    "another rank": {"name": "rank_5_0/evil"},
    "below a file": {"name": "rank_0_0/transformed_code.py/evil"},
    "not plain": {"name": "rank_0_0//evil"},
    "binary": {"name": "rank_0_0/evil", "binary": ".."},
}


@pytest.mark.parametrize("case", LISTS)
def test_manifests_that_lead_out(file: Path, other: Cache, case: str) -> None:
    """Sealed as it should be, by somebody who means harm."""
    content = members(file)
    manifest = msgspec.json.decode(b"{" + content[0][1].partition(b",")[2])
    rank = manifest["ranks"]["rank_0_0"]
    rank["files"][LISTS[case]["name"]] = rank["files"]["rank_0_0/transformed_code.py"]
    if "binary" in LISTS[case]:
        manifest["binaries"][LISTS[case]["binary"]] = manifest["binaries"][PIECE]
    evil = seal(msgspec.json.encode(manifest))
    write(
        file,
        [named(f"{HASH}/manifest.json", evil), *content[1:], named(f"{HASH}/{LISTS[case]['name']}", content[2][1])],
    )
    with pytest.raises(DamagedError):
        take(other, file)
    assert is_empty(other)
    assert not list(file.parent.rglob("evil"))


def test_another_format(file: Path, other: Cache) -> None:
    content = members(file)
    newer = encode(msgspec.structs.replace(make_manifest(), format=99))
    with pytest.raises(IncompatibleError, match="has format 99"):
        take(other, write(file, [named(f"{HASH}/manifest.json", newer), *content[1:]]))


def test_compressed(file: Path, other: Cache) -> None:
    import gzip

    file.write_bytes(gzip.compress(file.read_bytes()))
    with pytest.raises(DamagedError, match="is no archive of an artifact"):
        take(other, file)


def survives(other: Cache, file: Path, data: bytes, artifact: Artifact) -> None:
    """Either nothing gets in, or all of it as it was."""
    file.write_bytes(data)
    try:
        taken = take(other, file)
    except (DamagedError, IncompatibleError):
        assert is_empty(other)
    else:
        assert taken.manifest == artifact.manifest
        assert taken.verify() == 4
        other.layout.artifacts.joinpath(HASH).rename(file.with_name(f"taken{time.monotonic_ns()}"))
        other.prune(Rules())


FLIPS = 2000 if os.environ.get("FXC_TORTURE") else 150


def test_flipped_bytes(file: Path, artifact: Artifact, other: Cache) -> None:
    data = file.read_bytes()
    chance = random.Random(os.environ.get("FXC_TORTURE", "1"))
    headers = [index for index in range(len(data)) if data[index] and index % 512 < 345]
    for turn in range(FLIPS):
        hurt_data = bytearray(data)
        for _ in range(chance.choice((1, 1, 3))):
            hurt_data[chance.choice(headers) if turn % 2 else chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        survives(other, file, bytes(hurt_data), artifact)


def test_cut_off(file: Path, artifact: Artifact, other: Cache) -> None:
    data = file.read_bytes()
    for length in [*range(0, len(data), 1024), 1, 511, 513, len(data) - 1]:
        survives(other, file, data[:length], artifact)
