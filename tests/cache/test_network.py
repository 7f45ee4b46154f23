"""Network file systems: stale handles, names that come late, no locks or locks that end at the machine, errors anywhere."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fxc.cache import Artifact, Cache, Rules, files, lock
from fxc.errors import CacheIOError, CacheMissError, DamagedError, FxcError
from fxc.manifest import Manifest

from .conftest import CODE, HASH, PIECE, make_manifest
from .faulty_os import CALLS, REFUSED, FaultyOs
from .test_prune import ALL, NEW, OLD, add, hashes, names
from .test_publish import finish, publisher

Store = Callable[..., str]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FaultyOs:
    return FaultyOs(monkeypatch, str(tmp_path / "cache"))


@pytest.fixture
def filled(cache: Cache) -> Cache:
    add(cache, OLD, 1000.0)
    add(cache, NEW, 2000.0)
    cache.remember("ab", OLD, [])
    return cache


def use_all(cache: Cache) -> None:
    """Everything that is done with a cache."""
    add(cache, HASH, 3000.0)
    cache.remember("cd", HASH, [])
    assert cache.lookup("cd", lambda source: None) == HASH
    artifact = cache.artifact(cache.resolve(HASH))
    with artifact.use():
        assert artifact.verify() == 2
        assert artifact.read("rank_0_0/transformed_code.py") == CODE
    assert cache.binary(HASH) is not None
    assert HASH in hashes(cache)


@pytest.mark.parametrize("call", ["open", "stat", "listdir"])
def test_stale_handles(filled: Cache, faulty: FaultyOs, call: str) -> None:
    """Another machine has replaced what was known: asked again."""
    artifact = filled.artifact(OLD)
    for read in (
        lambda: filled.resolve(OLD[:8]),
        lambda: filled.artifact(OLD).manifest == artifact.manifest,
        lambda: artifact.verify(),
        lambda: artifact.read("rank_0_0/transformed_code.py"),
        lambda: filled.binary(OLD),
        lambda: filled.lookup("ab", lambda source: None),
    ):
        faulty.plan(call, errno.ESTALE, errno.ESTALE)
        assert read()
        faulty.plan(call)
    faulty.always(call, errno.ESTALE)
    with pytest.raises(FxcError):
        filled.artifact(OLD).verify() if call != "listdir" else filled.resolve(OLD[:8])


def test_a_file_that_comes_late(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is there, a file that it lists not yet."""
    artifact = filled.artifact(OLD)
    path = artifact.path / "rank_0_0" / "transformed_code.py"
    path.rename(path.with_name("late"))
    pauses: list[float] = []

    def arrive(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            path.with_name("late").rename(path)

    monkeypatch.setattr("fxc.cache.artifact.time.sleep", arrive)
    assert artifact.read("rank_0_0/transformed_code.py") == CODE
    assert pauses == [0.0, 0.05]
    path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        artifact.read("rank_0_0/transformed_code.py")
    assert pauses[2:] == [0.0, 0.05, 0.2]


def test_a_listing_that_lags(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole hash is found without one; a prefix is a miss."""
    monkeypatch.setattr(os, "listdir", lambda path: [])
    assert filled.resolve(OLD) == OLD
    with pytest.raises(CacheMissError):
        filled.resolve(OLD[:8])


@pytest.mark.parametrize("number", REFUSED)
def test_without_locks(cache: Cache, faulty: FaultyOs, number: int) -> None:
    """All works but to prune, for what is in use cannot be told."""
    faulty.always("flock", number)
    use_all(cache)
    assert faulty.calls["flock"] > 10
    for dry_run in (False, True):
        with pytest.raises(CacheIOError, match="its file system has no locks, so what is in use cannot be told"):
            cache.prune(ALL, dry_run=dry_run)
    assert names(cache.root / "staging") == []
    (cache.root / "staging" / "left").mkdir()
    (cache.root / "staging" / "left.alive").touch()
    with cache.staging():  # whose that is cannot be told either
        assert "left" in names(cache.root / "staging")
    faulty.always("flock", 0)
    assert [removal.hash for removal in cache.prune(ALL).removed] == [HASH]
    assert names(cache.root / "staging") == []


def test_locks_that_fail_otherwise(cache: Cache, faulty: FaultyOs) -> None:
    faulty.always("flock", errno.EIO)
    with pytest.raises(CacheIOError, match=r"cannot lock .*: Input/output error"):
        add(cache, HASH, 1.0)


def elsewhere(monkeypatch: pytest.MonkeyPatch, name: bytes = b"another kernel") -> None:
    """From now on this process is on another machine."""
    monkeypatch.setattr(lock, "_kernel", lambda: name)


@pytest.fixture
def no_lock_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)


def test_staging_of_another_machine(cache: Cache, monkeypatch: pytest.MonkeyPatch, no_lock_reaches: None) -> None:
    """Its lock cannot be seen here: it stays, until it is a day old."""
    with cache.staging() as theirs:
        (theirs / "half").touch()
        with monkeypatch.context() as patched:
            elsewhere(patched)
            with cache.staging() as mine:
                assert {theirs.name, mine.name} < {*names(cache.root / "staging")}
            assert cache.prune(Rules()).staging == 0
            assert (theirs / "half").exists()
            yesterday = time.time() - lock.DAY - 1
            os.utime(f"{theirs}.alive", (yesterday, yesterday))
            assert cache.prune(Rules()).staging == 1
        assert names(cache.root / "staging") == []


@pytest.mark.parametrize("exchange", [True, False])
def test_two_machines_publish_at_once(
    cache: Cache, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, no_lock_reaches: None, exchange: bool
) -> None:
    """The other one's artifact appears just before each of our first steps: there is a whole one at the end."""
    real, steps = os.rename, 0
    theirs = False

    def rename(source: Path, to: Path) -> None:
        nonlocal steps, theirs
        if Path(to).parent.name == "artifacts" and not theirs and steps < 3:
            steps += 1
            theirs = True
            with pytest.MonkeyPatch.context() as patched:
                elsewhere(patched)
                cache.publish(manifest, "rank_0_0", {"a": b"theirs"}, [])
            theirs = False
        real(source, to)

    monkeypatch.setattr(os, "rename", rename)
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    cache.publish(manifest, "rank_0_0", {"a": b"ours"}, [])
    assert steps == (1 if exchange else 3)
    assert cache.artifact(HASH).read("rank_0_0/a") == b"ours"
    assert cache.artifact(HASH).verify() == 1
    assert names(cache.root / "staging") == []


NO_LOCKS = """
import fcntl, sys
from fxc.cache import lock
fcntl.flock = lambda fd, how: None
lock._kernel = lambda: sys.argv[2].encode()
"""


def test_processes_of_many_machines(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each publishes the same again and again, and no lock reaches another one: readers never see half of it."""
    from . import test_publish

    monkeypatch.setattr(test_publish, "PUBLISH", NO_LOCKS + test_publish.PUBLISH)
    children = [publisher(tmp_path, 2 * number, 8) for number in range(3)]
    seen = 0
    while any(child.poll() is None for child in children):
        for summary in cache.list():
            assert cache.artifact(summary.hash).verify() == 2
            seen += 1
    for child in children:
        finish(child)
    assert seen
    assert names(cache.root / "staging") == []
    assert cache.binary(PIECE) is not None


def test_directories_that_cannot_be_moved(filled: Cache, faulty: FaultyOs, store: Store) -> None:
    """As those in a lower layer of an overlay."""
    orphan = store()
    faulty.always("exchange", 0)
    real = os.rename

    def moved(source: Path, to: Path) -> None:
        if Path(source).parent.name in ("artifacts", "binaries"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(source, to)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "rename", moved)
        patched.setattr(files, "_exchange", lambda one, other: False)
        manifest = filled.artifact(OLD).manifest
        filled.publish(manifest, "rank_0_0", {"transformed_code.py": b"new"}, [OLD])
        assert filled.artifact(OLD).read("rank_0_0/transformed_code.py") == b"new"
        pruned = filled.prune(Rules(keep_latest=1))
    assert [removal.hash for removal in pruned.removed] == [NEW]
    assert (hashes(filled), filled.binary(orphan)) == ([OLD], None)
    assert names(filled.root / "artifacts") == names(filled.root / "binaries") == [OLD]


TORTURE = bool(os.environ.get("FXC_TORTURE"))


@pytest.mark.parametrize("number", [errno.EIO, *([errno.ENOSPC, errno.EDQUOT, errno.ESTALE] if TORTURE else [])])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_at_any_call(cache: Cache, faulty: FaultyOs, call: str, number: int) -> None:
    """One line, if anything; and all works afterwards, with nothing left over."""
    for before in range(0, 36, 3 if TORTURE else 9):
        faulty.plan(call, *[0] * before, number)
        with suppress(FxcError):
            use_all(cache)
            cache.prune(Rules(keep_latest=1))
        faulty.plan(call)
    use_all(cache)
    cache.prune(Rules(keep_latest=1))
    assert [summary.hash for summary in cache.list()] == [HASH]
    assert cache.artifact(HASH).verify() == 2
    assert names(cache.root / "staging") == []


def test_close_fails(cache: Cache, faulty: FaultyOs) -> None:
    """What was written is lost, and said to be; a lock is let go of all the same."""
    faulty.always("close", errno.EIO)
    with pytest.raises(CacheIOError, match=r"cannot write .*: Input/output error"):
        add(cache, HASH, 1.0)
    with cache.lock("x"), cache.try_lock("y") as held:
        assert held
    faulty.always("close", 0)
    use_all(cache)


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
/* Fails with the number in FAULT, where FAULT_CALL names the call; every third time only where FAULT_SOMETIMES is set. */
static int fails(const char *call) {
    static int count;
    const char *which = getenv("FAULT_CALL");
    if (!which || strcmp(which, call)) return 0;
    if (getenv("FAULT_SOMETIMES") && count++ % 3) return 0;
    errno = atoi(getenv("FAULT"));
    return 1;
}
#define WRAP(name, arguments, values) \\
    int name arguments { \\
        int (*real) arguments = dlsym(RTLD_NEXT, #name); \\
        return fails(#name) ? -1 : real values; \\
    }
WRAP(flock, (int fd, int how), (fd, how))
WRAP(fsync, (int fd), (fd))
WRAP(rename, (const char *from, const char *to), (from, to))
WRAP(link, (const char *from, const char *to), (from, to))
WRAP(mkdir, (const char *path, mode_t mode), (path, mode))
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for LD_PRELOAD."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"], check=True)
    return folder / "shim.so"


@pytest.mark.parametrize(
    ("call", "number", "code", "told"),
    [
        ("flock", errno.ENOLCK, 0, ""),
        ("flock", errno.EOPNOTSUPP, 0, ""),
        ("link", errno.EXDEV, 0, ""),
        ("fsync", errno.EIO, 1, "Input/output error"),
        ("mkdir", errno.ENOSPC, 1, "No space left on device"),
        ("rename", errno.EIO, 1, "Input/output error"),
    ],
)
def test_a_real_process(cache: Cache, shim: Path, tmp_path: Path, call: str, number: int, code: int, told: str) -> None:
    """`fxc import` and what it calls, under a C library that fails so."""
    add(cache, HASH, 1.0)
    cache.export(cache.artifact(HASH), tmp_path / "model.tar")
    environ = {**os.environ, "LD_PRELOAD": str(shim), "FAULT_CALL": call, "FAULT": str(number), "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    other = tmp_path / "other"
    command = [sys.executable, "-m", "fxc", "import", str(tmp_path / "model.tar"), "--cache-dir", str(other)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "fault of fxc" not in done.stderr
    found = Cache.open(other, {})
    assert hashes(found) == ([HASH] if code == 0 else [])
    assert names(found.root / "staging") == []
    if code == 0:
        assert found.artifact(HASH).verify() == 2


def test_opened_before_it_was_replaced_by_another_machine(filled: Cache) -> None:
    """What a reader opened, and read half of, goes on with what is there now."""
    artifact = filled.artifact(OLD)
    filled.publish(make_manifest(OLD), "rank_0_0", {"transformed_code.py": b"new"}, [])
    assert artifact.read("rank_0_0/transformed_code.py") == b"new"
    assert isinstance(artifact, Artifact)
