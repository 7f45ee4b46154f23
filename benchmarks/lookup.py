"""How long it takes to find an artifact among ten and among 10,000, and `verify` against sha256sum of the same files.

    python benchmarks/lookup.py    writes results/lookup.json

The artifacts are made by hand, a manifest each, of the size that a small decoder has. Times are in this process, after
imports, with everything in the page cache; the best of 20.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from fxc import machine
from fxc.cache import Cache, key
from fxc.cache.layout import MANIFEST
from fxc.manifest import Factor, File, Manifest, Rank, Source, Weight, encode
from fxc.spec import ModelSpec, Spec

FEW, MANY = 10, 10_000
SOURCES = (Source(file="tiny.py", digest="1"),)
VERIFIED = 256 << 20
"""Bytes that `verify` reads."""
PARTS = 32


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        few, many = (fill(Path(directory) / str(count), count) for count in (FEW, MANY))
        times = {name: {"few": took(few, call), "many": took(many, call)} for name, call in CALLS.items()}
        verified = verify(Path(directory) / "verify")
    result = {
        "artifacts": {"few": FEW, "many": MANY},
        "ms": {name: {of: round(1e3 * value, 3) for of, value in pair.items()} for name, pair in times.items()},
        "ratio": {name: round(pair["many"] / pair["few"], 2) for name, pair in times.items()},
        "verify": verified,
    }
    place = Path(__file__).parent / "results" / "lookup.json"
    place.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(place.read_text(encoding="utf-8"), end="")


def manifest(hash: str) -> Manifest:
    return Manifest(
        hash=hash, fxc="0", created="2026-01-01T00:00:00Z", model="Tiny",
        spec=Spec(model=ModelSpec(target="tiny.py:Tiny"), device="cpu"), target=machine.probe("cpu", compiler=False),
        factors=tuple(Factor(name=f"factor_{index}", value="v" * 60) for index in range(20)),
        inputs=(), outputs="y",
        weights=tuple(Weight(name=f"layers.{index}.weight", shape=(64, 64), dtype="float32") for index in range(40)),
        constants=(), programs=(), pieces={}, binaries={},
    )  # fmt: skip


def fill(directory: Path, count: int) -> Cache:
    """A cache with so many artifacts, the last one in the index."""
    cache = Cache.open(directory, {})
    cache.layout.prepare()
    for index in range(count):
        hash = key.digest(str(index))
        path = cache.root / "artifacts" / hash
        path.mkdir(mode=0o700)
        (path / MANIFEST).write_bytes(encode(manifest(hash)))
        (path / MANIFEST).chmod(0o600)
    cache.remember("d" * 32, hash, SOURCES)
    return cache


def by_key(cache: Cache) -> None:
    found = cache.lookup("d" * 32, lambda source: source.digest)
    assert found is not None
    cache.artifact(found)


def by_hash(cache: Cache) -> None:
    cache.artifact(cache.resolve(key.digest("0")))


def by_prefix(cache: Cache) -> None:
    cache.artifact(cache.resolve(key.digest("0")[:12]))


CALLS: dict[str, Callable[[Cache], None]] = {"model.yaml": by_key, "hash": by_hash, "prefix": by_prefix}


def took(cache: Cache, call: Callable[[Cache], None]) -> float:
    """Seconds."""
    return min(timed(lambda: call(Cache.open(cache.root.parent, {}))) for _ in range(20))


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def verify(directory: Path) -> dict[str, float]:
    """Both in turns; the best of five of each."""
    hash = key.digest("verify")
    path = directory / hash
    (path / "rank_0_0").mkdir(parents=True)
    files = {}
    for index in range(PARTS):
        name = f"rank_0_0/{index}.so"
        (path / name).write_bytes(bytes([index]) * (VERIFIED // PARTS))
        files[name] = File(bytes=VERIFIED // PARTS, sha256=key.sha256_file(path / name))
    made = msgspec.structs.replace(
        manifest(hash), ranks={"rank_0_0": Rank(rank=0, data_parallel_rank=0, world_size=1, files=files)}
    )
    (path / MANIFEST).write_bytes(encode(made))
    from fxc.cache import Artifact

    artifact = Artifact.open(path)
    names = [str(path / name) for name in files]
    ours, theirs = [], []
    for _ in range(5):
        ours.append(timed(artifact.verify))
        theirs.append(timed(lambda: subprocess.run(["sha256sum", *names], stdout=subprocess.DEVNULL, check=True)))
    return {
        "GB_per_s": round(VERIFIED / min(ours) / 1e9, 2),
        "sha256sum_GB_per_s": round(VERIFIED / min(theirs) / 1e9, 2),
        "ratio_of_time": round(min(ours) / min(theirs), 2),
    }


if __name__ == "__main__":
    main()
