from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fxc.cache import Artifact, Cache, files
from fxc.errors import CacheIOError, CacheMissError, DamagedError, UsageError
from fxc.manifest import Manifest, Rank

from .conftest import CODE, HASH, LIBRARY, PIECE
from .test_binaries import OTHER, hurt

Store = Callable[..., str]
BINARY = f"inductor/{PIECE}.so"


def tree(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_a_new_one(cache: Cache, store: Store, manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "constants").write_bytes(b"abc")
    given: dict[str, bytes | Path] = {"transformed_code.py": CODE, "constants.safetensors": tmp_path / "constants"}
    artifact = cache.publish(manifest, "rank_0_0", given, [store(), PIECE])
    listed = {f"rank_0_0/{name}" for name in ("transformed_code.py", "constants.safetensors", BINARY)}
    assert artifact.path == cache.root / "artifacts" / HASH
    assert tree(artifact.path) == listed | {"manifest.json"}
    rank = artifact.manifest.ranks["rank_0_0"]
    assert (rank.rank, rank.data_parallel_rank, rank.world_size) == (0, 0, 1)
    assert set(rank.files) == listed
    assert rank.files["rank_0_0/constants.safetensors"].bytes == 3
    assert cache.artifact(HASH) == artifact
    assert list((cache.root / "staging").iterdir()) == []
    for path in cache.root.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_binaries_are_hard_links(cache: Cache, store: Store, manifest: Manifest) -> None:
    artifact = cache.publish(manifest, "rank_0_0", {}, [store()])
    assert os.path.samefile(artifact.path / "rank_0_0" / BINARY, cache.binary_files(PIECE)[0])


def test_binaries_are_copied_where_links_do_not_work(
    cache: Cache, store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    for rank in ("rank_0_0", "rank_1_0"):
        artifact = cache.publish(manifest, rank, {}, [store()], world_size=2)
    assert artifact.read(f"rank_0_0/{BINARY}") == artifact.read(f"rank_1_0/{BINARY}") == LIBRARY
    assert not os.path.samefile(artifact.path / "rank_0_0" / BINARY, cache.binary_files(PIECE)[0])


def test_ranks_are_added_and_kept(cache: Cache, store: Store, manifest: Manifest) -> None:
    for rank, data in (("rank_1_0", b"1"), ("rank_0_0", b"0"), ("rank_2_1", b"2")):
        artifact = cache.publish(manifest, rank, {"transformed_code.py": data}, [store()], world_size=4)
    assert list(artifact.manifest.ranks) == ["rank_0_0", "rank_1_0", "rank_2_1"]
    assert artifact.manifest.ranks["rank_2_1"].data_parallel_rank == 1
    assert artifact.manifest.ranks["rank_1_0"].world_size == 4
    assert artifact.read("rank_1_0/transformed_code.py") == b"1"
    assert cache.artifact(HASH).verify() == 6
    assert os.stat(artifact.path / "rank_0_0" / BINARY).st_nlink == 4


def test_ranks_of_the_given_manifest_do_not_count(cache: Cache, manifest: Manifest) -> None:
    manifest.ranks["rank_7_0"] = Rank(rank=7, data_parallel_rank=0, world_size=8, files={})
    assert list(cache.publish(manifest, "rank_0_0", {}, []).manifest.ranks) == ["rank_0_0"]


@pytest.mark.parametrize("name", ["rank_0_0/transformed_code.py", f"rank_0_0/{BINARY}", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_one_is_mended(cache: Cache, store: Store, manifest: Manifest, name: str, damage: str) -> None:
    def build() -> Artifact:
        if cache.binary(PIECE) is None:
            store(OTHER)  # a compiler never writes the same bytes twice
        return cache.publish(manifest, "rank_0_0", {"transformed_code.py": CODE}, [PIECE])

    artifact = build()
    hurt(artifact.path / name, damage)
    with pytest.raises((DamagedError, CacheMissError)):
        cache.artifact(HASH).verify()
    build()
    assert cache.artifact(HASH).verify() == 2
    assert list((cache.root / "staging").iterdir()) == []


def test_a_damaged_rank_stays_damaged_until_its_own_build(cache: Cache, manifest: Manifest) -> None:
    artifact = cache.publish(manifest, "rank_0_0", {"transformed_code.py": CODE}, [])
    hurt(artifact.path / "rank_0_0/transformed_code.py", "missing")
    artifact = cache.publish(manifest, "rank_1_0", {"transformed_code.py": CODE}, [])
    assert artifact.verify("rank_1_0") == 1
    with pytest.raises(DamagedError, match=r"rank_0_0/transformed_code\.py is missing"):
        artifact.verify()
    assert cache.publish(manifest, "rank_0_0", {"transformed_code.py": CODE}, []).verify() == 2


def test_directories_without_a_manifest_are_swept(cache: Cache, manifest: Manifest) -> None:
    half = cache.root / "artifacts" / ("f" * 32)
    (half / "rank_0_0").mkdir(parents=True)
    os.utime(half, (0, 0))  # a young one may be one that is being copied in
    young = half.with_name("e" * 32)
    young.mkdir()
    (cache.root / "artifacts" / HASH / "rank_0_0").mkdir(parents=True)
    artifact = cache.publish(manifest, "rank_0_0", {"transformed_code.py": CODE}, [])
    assert artifact.verify() == 1
    assert not half.exists()
    assert young.exists()


def test_a_file_in_its_place(cache: Cache, manifest: Manifest) -> None:
    (cache.root / "artifacts").mkdir(parents=True)
    (cache.root / "artifacts" / HASH).write_text("not a directory")
    assert cache.publish(manifest, "rank_0_0", {"a": b""}, []).verify() == 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_binary_damaged_during_the_build(cache: Cache, store: Store, manifest: Manifest, damage: str) -> None:
    store()
    hurt(cache.binary_files(PIECE)[0], damage)
    with pytest.raises(DamagedError, match=rf"{PIECE}\.so was damaged or removed during the build"):
        cache.publish(manifest, "rank_0_0", {}, [PIECE])
    assert cache.list() == []


def test_nonsense(cache: Cache, manifest: Manifest) -> None:
    with pytest.raises(UsageError, match="rank directory 'rank_0': expected rank_<r>_<d>"):
        cache.publish(manifest, "rank_0", {}, [])
    with pytest.raises(UsageError, match=r"file name '\.\./x' leaves the artifact"):
        cache.publish(manifest, "rank_0_0", {"../x": b""}, [])
    with pytest.raises(CacheMissError, match="no binary 00"):
        cache.publish(manifest, "rank_0_0", {}, ["00"])


def test_where_directories_cannot_be_exchanged(
    cache: Cache, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    for data in (b"1", b"2"):
        cache.publish(manifest, "rank_0_0", {"a": data}, [])
    assert cache.artifact(HASH).read("rank_0_0/a") == b"2"
    assert list((cache.root / "staging").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free some space there"),
        (errno.EDQUOT, "free some space there"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "check the directory's owner and mode"),
    ],
)
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "rename"])
def test_what_the_system_refuses_is_one_line(
    cache: Cache, store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, number: int, hint: str, call: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), "/somewhere/deep/in/staging")

    def write() -> None:
        cache.publish(manifest, "rank_0_0", {"a": b"1"}, [])

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        for attempt in (write, lambda: cache.remember("ab", HASH, []), store):
            with pytest.raises(CacheIOError) as caught:
                attempt()
            assert str(cache.root) in caught.value.message
            assert caught.value.message.endswith(f": {os.strerror(number)}")
            assert "\n" not in caught.value.message
            assert caught.value.hint.startswith(hint)
            assert "--cache-dir" in caught.value.hint
    assert cache.list() == []
    write()
    assert cache.artifact(HASH).verify() == 1
    assert list((cache.root / "staging").iterdir()) == []


PUBLISH = """
import sys
from pathlib import Path
from fxc.cache import Cache, key
from tests.cache.conftest import PIECE, make_binary, make_manifest
cache = Cache.open(Path(sys.argv[1]) / "cache")
manifest = make_manifest()
source = Path(sys.argv[1]) / f"compiled_{sys.argv[2]}"
count = 0
while count < int(sys.argv[3]) or int(sys.argv[3]) < 0:
    data = f"{sys.argv[2]} {count}".encode() * 1000
    source.write_bytes(data)
    cache.store_binary(PIECE, {f"{PIECE}.so": source}, make_binary(data), force=count % 2 == 0)
    try:
        cache.publish(manifest, f"rank_{int(sys.argv[2]) % 2}_0", {"transformed_code.py": data[:50]}, [PIECE])
    except Exception as error:
        if "during the build" not in str(error):  # another one forces its binary in between
            raise
    count += 1
    print(count, flush=True)
"""


def publisher(directory: Path, number: int, count: int = -1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PUBLISH, str(directory), str(number), str(count)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> None:
    _, errors = child.communicate()
    assert child.returncode == 0, errors


def check(cache: Cache) -> int:
    """What a reader sees: a whole artifact."""
    artifact = cache.artifact(cache.resolve(HASH[:6]))
    for rank in artifact.manifest.ranks:
        assert len(artifact.read(f"{rank}/transformed_code.py")) == 50
    return artifact.verify()


def test_killed_at_random_moments_with_readers(cache: Cache, tmp_path: Path) -> None:
    generator = random.Random(0)
    reads = 0
    finish(publisher(tmp_path, 0, 1))
    for number in range(0, 8, 2):
        children = [publisher(tmp_path, number), publisher(tmp_path, number + 1)]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "1\n"
        for child in children:
            end = time.monotonic() + generator.uniform(0, 0.1)
            while time.monotonic() < end:
                check(cache)
                reads += 1
            child.kill()
            child.communicate()
        check(cache)
        assert [path.name for path in (cache.root / "artifacts").iterdir()] == [HASH]
    assert reads > 8
    finish(publisher(tmp_path, 1, 2))
    assert cache.artifact(HASH).verify() == 4
    assert cache.binary(PIECE) is not None
    with cache.staging() as mine:
        assert {path.stem for path in mine.parent.iterdir()} == {mine.name}  # what the killed ones left is gone


def test_several_at_once(cache: Cache, tmp_path: Path) -> None:
    children = [publisher(tmp_path, number, 8) for number in range(4)]
    while any(child.poll() is None for child in children):
        if cache.list():
            check(cache)
    for child in children:
        finish(child)
    assert set(cache.artifact(HASH).manifest.ranks) == {"rank_0_0", "rank_1_0"}
    assert check(cache) == 4
