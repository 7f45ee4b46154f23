from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from fxc.cache import Artifact, Cache
from fxc.errors import CacheIOError, CacheMissError, DamagedError, IncompatibleError
from fxc.manifest import Manifest, Rank, seal

from .conftest import CODE, HASH, LIBRARY, PIECE
from .test_binaries import hurt

TEXT = "rank_0_0/transformed_code.py"
BINARY = f"rank_0_0/inductor/{PIECE}.so"


@pytest.fixture
def artifact(cache: Cache, store: Callable[..., str], manifest: Manifest) -> Artifact:
    return cache.publish(manifest, "rank_0_0", {"transformed_code.py": CODE}, [store()])


def test_read_and_verify(artifact: Artifact) -> None:
    assert artifact.read(TEXT) == CODE
    assert artifact.read(BINARY) == LIBRARY
    assert artifact.verify() == artifact.verify("rank_0_0") == 2


@pytest.mark.parametrize("name", [TEXT, BINARY])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_file_is_named(artifact: Artifact, name: str, damage: str) -> None:
    hurt(artifact.path / name, damage)
    for check in (artifact.verify, lambda: artifact.read(name)):
        with pytest.raises(DamagedError) as caught:
            check()
        assert str(artifact.path / name) in caught.value.message
        assert caught.value.hint == "run `fxc build` again: it mends the artifact"
        assert caught.value.exit_code == 5


def test_messages_say_what_came_and_what_was_expected(artifact: Artifact) -> None:
    (artifact.path / TEXT).write_bytes(b"x =")
    with pytest.raises(DamagedError, match=r"is damaged: it has 3 bytes, expected 6$"):
        artifact.read(TEXT)
    (artifact.path / TEXT).write_bytes(b"x = 2\n")
    with pytest.raises(DamagedError, match=r"is damaged: its sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}$"):
        artifact.read(TEXT)


def test_other_ranks_do_not_matter_to_one(cache: Cache, artifact: Artifact, manifest: Manifest) -> None:
    both = cache.publish(manifest, "rank_1_0", {"transformed_code.py": CODE}, [], world_size=2)
    hurt(both.path / TEXT, "flipped")
    assert both.verify("rank_1_0") == 1
    with pytest.raises(DamagedError, match=TEXT):
        both.verify()


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_manifest(cache: Cache, artifact: Artifact, damage: str) -> None:
    hurt(artifact.path / "manifest.json", damage)
    with pytest.raises(DamagedError, match=rf"{HASH}/manifest\.json is damaged"):
        cache.artifact(HASH)


def test_a_flipped_byte_anywhere_in_the_manifest_is_noticed(artifact: Artifact, tmp_path: Path) -> None:
    data = (artifact.path / "manifest.json").read_bytes()
    for at in [*range(8), *range(8, len(data), 17), len(data) - 1]:
        (tmp_path / "manifest.json").write_bytes(data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :])
        with pytest.raises((DamagedError, IncompatibleError)):
            Artifact.open(tmp_path)


def test_not_an_artifact(cache: Cache, artifact: Artifact, tmp_path: Path) -> None:
    (artifact.path / "manifest.json").unlink()
    for where in (artifact.path, tmp_path / "absent", tmp_path / "compiled.so"):
        with pytest.raises(CacheMissError, match=r"is not an artifact: it has no manifest\.json"):
            Artifact.open(where)
    with pytest.raises(CacheMissError):
        cache.artifact(HASH)


def test_another_format(artifact: Artifact) -> None:
    path = artifact.path / "manifest.json"
    path.write_bytes(seal(json.dumps({"format": 2, "novelty": 1}).encode()))
    with pytest.raises(IncompatibleError, match=r"manifest\.json has format 2, this fxc reads 1"):
        Artifact.open(artifact.path)
    path.write_bytes(artifact.data.replace(b'"format": 1', b'"format": 3'))
    with pytest.raises(DamagedError, match="it is not the text that was written"):
        Artifact.open(artifact.path)


def test_a_renamed_directory_in_the_cache(cache: Cache, artifact: Artifact) -> None:
    other = "0" * 32
    artifact.path.rename(artifact.path.with_name(other))
    with pytest.raises(DamagedError, match=f"{other}/manifest.json is of artifact {HASH}"):
        cache.artifact(other)
    assert Artifact.open(artifact.path.with_name(other)).verify() == 2


def test_a_file_is_read_without_looking_through_other_ranks(artifact: Artifact) -> None:
    class Apart(dict[str, Rank]):
        def values(self) -> NoReturn:  # type: ignore[override]
            raise AssertionError("all ranks were looked through")

        items = values  # type: ignore[assignment]

    ranks = Apart(artifact.manifest.ranks)
    one = msgspec.structs.replace(artifact, manifest=msgspec.structs.replace(artifact.manifest, ranks=ranks))
    assert one.read(TEXT) == CODE
    assert one.verify("rank_0_0") == 2


def test_moved_and_copied(artifact: Artifact, tmp_path: Path) -> None:
    shutil.copytree(artifact.path, tmp_path / "copy")
    artifact.path.rename(tmp_path / "moved")
    for place in ("copy", "moved"):
        found = Artifact.open(tmp_path / place)
        assert (found.verify(), found.read(TEXT), found.manifest) == (2, CODE, artifact.manifest)


def test_rank_directories(artifact: Artifact) -> None:
    assert artifact.rank_dir() == "rank_0_0"
    with pytest.raises(CacheMissError) as caught:
        artifact.rank_dir(3, 1)
    assert caught.value.message == f"artifact {HASH} has no rank_3_1; its ranks are: rank_0_0"
    assert caught.value.hint == "build it with --rank 3 --dp-rank 1"


@pytest.mark.parametrize("name", ["rank_0_0/absent", "../artifact", "/etc/passwd", "manifest.json", ""])
def test_only_listed_files_are_read(artifact: Artifact, name: str) -> None:
    with pytest.raises(DamagedError, match=rf"manifest\.json lists no file {name}"):
        artifact.read(name)


def test_a_file_that_may_not_be_read(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CacheIOError, match=r"cannot read .*transformed_code\.py: Permission denied") as caught:
        artifact.read(TEXT)
    assert caught.value.exit_code == 1


def test_a_reader_whose_artifact_is_built_again_reads_on(cache: Cache, artifact: Artifact, manifest: Manifest) -> None:
    cache.publish(manifest, "rank_0_0", {"transformed_code.py": b"x = 2  # by hand\n"}, [])
    assert artifact.read(TEXT) == b"x = 2  # by hand\n"
    with pytest.raises(DamagedError, match="lists no file"):
        artifact.read(BINARY)
