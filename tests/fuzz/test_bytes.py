"""Any change of any file: noticed with exit code 5, or a miss where the file is a shortcut; never run, never a traceback."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxc import capture_plan
from fxc.cache import Cache, Trust
from fxc.cli.main import run
from tests.cache.conftest import PIECE

from . import world
from .conftest import put
from .mutations import changed_bytes

TIMES = 20 if os.environ.get("FXC_TORTURE") else 1
RANDOM = st.randoms(use_true_random=False)
DAMAGED = "DamagedError"


def fuzz(cases: int) -> Callable[..., object]:
    return settings(
        max_examples=cases * TIMES, deadline=None, derandomize=TIMES == 1, database=None,
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip


LISTED = {"code": ("transformed_code.py", 400), "constants": ("constants.safetensors", 200), "graph": ("computation_graph.py", 50)}  # fmt: skip


@pytest.mark.parametrize("kind", LISTED)
def test_a_listed_file(cache: Cache, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the code, only the text that was written is ever executed."""
    name, cases = LISTED[kind]
    path = world.only(cache)
    file = path / "rank_0_0" / name
    data = file.read_bytes()

    @fuzz(cases)
    @given(RANDOM)
    def check(chance: Random) -> None:
        put(file, changed_bytes(data, chance))
        assert world.outcome(cache.artifact(path.name).verify, (5,)) == DAMAGED
        if kind != "graph":  # which no program needs
            with world.Ran().watched(monkeypatch) as ran:
                assert world.outcome(lambda: world.load(path), (5,)) == DAMAGED
            assert set(ran) <= {world.CODE}
            assert kind != "code" or ran == []

    check()


def test_the_manifest(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.only(cache)
    data = (path / "manifest.json").read_bytes()

    @fuzz(400)
    @given(RANDOM)
    def check(chance: Random) -> None:
        put(path / "manifest.json", changed_bytes(data, chance))
        with world.Ran().watched(monkeypatch) as ran:
            assert world.outcome(lambda: world.load(path), (5,)) == DAMAGED
        assert ran == []
        (entry,) = cache.list()
        assert entry.manifest is None

    check()


def test_an_index_entry(cache: Cache) -> None:
    """A miss: the model is traced again."""
    digests = {source.file: source.digest for source in world.SOURCES}
    file = cache.root / "index" / f"{world.DIRECT}.json"
    data = file.read_bytes()
    assert cache.lookup(world.DIRECT, lambda source: digests[source.file]) == world.only(cache).name

    @fuzz(250)
    @given(RANDOM)
    def check(chance: Random) -> None:
        put(file, changed_bytes(data, chance))
        assert cache.lookup(world.DIRECT, lambda source: digests[source.file]) is None

    check()


def test_a_note_of_captures(cache: Cache) -> None:
    file = capture_plan.beside(world.only(cache))
    data = file.read_bytes()
    assert capture_plan.read(file) is not None

    @fuzz(150)
    @given(RANDOM)
    def check(chance: Random) -> None:
        put(file, changed_bytes(data, chance))
        assert capture_plan.read(file) is None

    check()


@pytest.mark.parametrize("name", ["record.json", f"{PIECE}.so"])
def test_a_binary(cache: Cache, tmp_path: Path, name: str) -> None:
    """A miss: it is compiled again. In a read-only place, where it stays."""
    over = Cache.open(tmp_path / "over", {"FXC_CACHE_PATH": str(cache.root.parent)})
    file = cache.root / "binaries" / PIECE / name
    data = file.read_bytes()
    assert over.binary(PIECE) is not None

    @fuzz(200 if name == "record.json" else 50)
    @given(RANDOM)
    def check(chance: Random) -> None:
        put(file, changed_bytes(data, chance))
        assert over.binary(PIECE) is None

    check()


@pytest.fixture
def archive(cache: Cache, tmp_path: Path) -> Path:
    cache.export(cache.artifact(world.only(cache).name), tmp_path / "model.tar")
    return tmp_path / "model.tar"


def taken(file: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> str:
    """What an import comes to: the artifact as it was, or nothing at all."""
    other = Cache.open(file.with_name("other"), {})
    shutil.rmtree(other.root, ignore_errors=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda fd: None)  # which takes longer than all the rest
        found = world.outcome(lambda: other.import_file(file, Trust()).manifest.hash, (5,))
    assert not other.root.exists() or list((other.root / "staging").iterdir()) == []
    if found == DAMAGED:
        assert other.list() == []
        return found
    there = other.artifact(world.only(cache).name)
    assert there.manifest == world.manifest_of(cache)
    there.verify()
    return "taken"


def test_an_archive(cache: Cache, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive.read_bytes()
    assert taken(archive, cache, monkeypatch) == "taken"

    @fuzz(150)
    @given(RANDOM)
    def check(chance: Random) -> None:
        archive.write_bytes(changed_bytes(data, chance))
        taken(archive, cache, monkeypatch)

    check()


FIELDS = ((0, 100), (100, 108), (124, 136), (156, 157), (157, 257), (257, 265), (345, 500))
"""Of a tar header: name, mode, size, type, link, magic, prefix. Its checksum is made good again."""


def changed_header(header: bytes, chance: Random) -> bytes:
    made = bytearray(header)
    for _ in range(chance.randrange(1, 3)):
        start, end = chance.choice(FIELDS)
        made[start:end] = chance.choice(
            (
                chance.randbytes(end - start),
                bytes([chance.choice(b"\0\x80\xff70/.")]) * (end - start),
                made[start:end][::-1],
                (b"../" * 50)[: end - start],
            )
        )
        if chance.random() < 0.3:
            made[156] = chance.choice(b"01234567LKxgSXDMNV")
    made[148:156] = b"%06o\0 " % (256 + sum(made[:148]) + sum(made[156:512]))
    return bytes(made)


def test_headers_of_an_archive(cache: Cache, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive.read_bytes()
    with tarfile.open(archive) as tar:
        offsets = [member.offset for member in tar]

    @fuzz(150)
    @given(RANDOM)
    def check(chance: Random) -> None:
        at = chance.choice(offsets)
        archive.write_bytes(data[:at] + changed_header(data[at : at + 512], chance) + data[at + 512 :])
        taken(archive, cache, monkeypatch)

    check()


def test_through_the_command_line(cache: Cache, archive: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A few of each, by `verify`, `warm`, `ls`, `inspect` and `import`."""
    path = world.only(cache)
    place = ("--cache-dir", str(cache.root.parent))
    files = [archive, *(path / "rank_0_0" / name for name, _ in LISTED.values()), path / "manifest.json"]
    for seed in range(TIMES):
        for file in files:
            data = file.read_bytes()
            put(file, changed_bytes(data, Random(seed)))
            damaged = file.name == "manifest.json"
            calls = {("verify", path.name): 5, ("warm", path.name): 5, ("ls",): 0, ("inspect", path.name): 5 if damaged else 0}  # fmt: skip
            if file.name == "computation_graph.py":
                calls[("inspect", path.name, "--graph")] = 5
            if file == archive:
                put(file, changed_bytes(data[:4096], Random(seed)))
                calls = {("import", str(file)): 5}
            for call, code in calls.items():
                assert run([*call, *place]) == code, (seed, file, call)
                told = capfd.readouterr()
                assert "fault of fxc" not in told.err
                assert (told.err.count("fxc: error:"), told.err.count("Traceback")) == (int(code > 0), 0)
            put(file, data)
