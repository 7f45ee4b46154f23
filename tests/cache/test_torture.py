"""Two builders, a pruner, a puller and four loaders on one cache, all killed at random moments, again and again."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import handmade
import msgspec
import pytest
import torch

from fxc.cache import Cache, Remote, Rules, Trust, key
from fxc.errors import CacheMissError
from fxc.manifest import decode
from fxc.runtime import loader

from .conftest import make_binary
from .test_prune import names

ROUNDS = 200 if os.environ.get("FXC_TORTURE") else 4
HASHES = [key.digest(str(index)) for index in range(4)]
KINDS = ("build", "build", "prune", "pull", "load", "load", "load", "load")

Done = list["Synchronized[int]"]


def build(cache: Cache, remote: Remote, hash: str, chance: random.Random) -> None:
    """A program that adds the number of its hash, and a binary of its own, as large as one is."""
    number = float(HASHES.index(hash))
    written = cache.root.parent.with_name(f"{hash}.{os.getpid()}")
    shutil.rmtree(written, ignore_errors=True)
    handmade.write(written, constants={"bias": torch.full((4,), number)})
    manifest = msgspec.structs.replace(decode((written / "manifest.json").read_bytes(), ""), hash=hash)
    library = hash.encode() * 10_000
    source = written / "library.so"
    source.write_bytes(library)
    with cache.building():
        cache.store_binary(hash, {f"{hash}.so": source}, make_binary(library), force=chance.random() < 0.3)
        files: dict[str, bytes | Path] = {
            name: written / "rank_0_0" / name for name in ("transformed_code.py", "constants.safetensors")
        }
        binaries = {hash: make_binary(library)}
        cache.publish(msgspec.structs.replace(manifest, binaries=binaries), "rank_0_0", files, [hash])
    cache.remember(hash, hash, [])
    shutil.rmtree(written)


def prune(cache: Cache, remote: Remote, hash: str, chance: random.Random) -> None:
    cache.prune(Rules(keep_latest=chance.randrange(3)))


def pull(cache: Cache, remote: Remote, hash: str, chance: random.Random) -> None:
    cache.pull(remote, remote.manifest(hash), Trust(), lambda count: None)


def load(cache: Cache, remote: Remote, hash: str, chance: random.Random) -> None:
    """What is loaded is whole and right, and stays in the cache as long as it is used."""
    program = loader.load(hash, cache_dir=cache.root.parent)
    program.bind({"linear.weight": torch.eye(4)})
    result = program(torch.ones(1, 4), torch.ones(1, 1))
    assert result.tolist() == [[1.0 + HASHES.index(hash)] * 4]
    assert cache.artifact(hash).verify() == 3, "pruned in use"


WORK: dict[str, Callable[[Cache, Remote, str, random.Random], None]] = {
    "build": build, "prune": prune, "pull": pull, "load": load,
}  # fmt: skip


def work(kind: str, directory: str, seed: int, done: Synchronized[int]) -> None:
    torch.set_num_threads(1)
    cache, remote = Cache.open(Path(directory) / "cache", {}), Remote.open(f"{directory}/remote")
    chance = random.Random(seed)
    while multiprocessing.parent_process().is_alive():
        with suppress(CacheMissError):  # pruned, or not built yet
            WORK[kind](cache, remote, chance.choice(HASHES), chance)
            done.value += 1


def did(done: Done, kind: str) -> int:
    return sum(count.value for name, count in zip(KINDS, done, strict=True) if name == kind)


@pytest.fixture(scope="module")
def forks() -> ForkServerContext:
    """Processes out of one that has torch imported, so that a round is short."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cache.test_torture", "fxc.runtime.loader", "safetensors.torch", "fsspec"])
    return context


def test_torture(cache: Cache, tmp_path: Path, forks: ForkServerContext, record_property: Callable[..., None]) -> None:
    """What is left is whole, what was in use is left, nobody fails but by being killed, and the next prune leaves
    nothing in staging."""
    chance = random.Random(os.environ.get("FXC_TORTURE", "1"))
    remote = Remote.open(str(tmp_path / "remote"))
    for hash in HASHES:
        build(cache, remote, hash, chance)
        remote.push(cache.artifact(hash), [], False, lambda count: None)
    totals = dict.fromkeys(WORK, 0)
    kept = 0
    for turn in range(ROUNDS):
        done: Done = [forks.Value("q", 0) for _ in KINDS]
        children: list[ForkServerProcess] = []
        for index, kind in enumerate(KINDS):
            child = forks.Process(target=work, args=(kind, str(tmp_path), turn * 10 + index, done[index]), daemon=True)
            child.start()
            children.append(child)
        end = time.monotonic() + 60
        least = chance.randrange(1, 4)
        while min(did(done, "build"), did(done, "load")) < least and time.monotonic() < end:
            assert all(child.is_alive() for child in children), [child.exitcode for child in children]
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.2))
        uses = {}
        for summary in cache.list():
            with suppress(CacheMissError):
                uses[summary.hash] = cache.artifact(summary.hash).use()
        for child in chance.sample(children, len(children)):
            time.sleep(chance.uniform(0, 0.05))
            child.kill()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [-9] * len(children)
        cache.prune(Rules(keep_latest=0))
        there = {summary.hash for summary in cache.list()}
        assert set(uses) <= there
        for hash in there:
            load(cache, remote, hash, chance)
        for use in uses.values():
            use.close()
        assert names(cache.root / "staging") == names(cache.root / "incoming") == []
        kept += len(uses)
        print(f"round {turn}: {totals}, {kept}", flush=True)
        for kind, count in zip(KINDS, done, strict=True):
            totals[kind] += count.value
    cache.prune(Rules(keep_latest=0))
    assert cache.list() == []
    assert names(cache.root / "binaries") == names(cache.root / "artifacts") == names(cache.root / "staging") == []
    assert not [name for name in names(cache.root / "locks") if name.startswith("use.")]
    assert all(totals.values()), totals
    record_property("totals", totals)
    print(f"{ROUNDS} rounds: {totals}, {kept} artifacts in use when the others were killed")
