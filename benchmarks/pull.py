"""How fast an artifact of many binaries comes from S3, against one file of its size: benchmarks/results/pull.{json,md}.

python benchmarks/pull.py [--binaries 200] [--bytes 320000] [--turns 9]

The server is the one of the tests, moto, on this machine. In each turn, one after the other: the file, by s3fs; the
artifact, by `Cache.pull` into an empty cache, which checks every digest and writes all through to the disk; and as many
bare requests as there are binaries, sixteen at a time. The ratio is that of one turn. CPU seconds are those of this
process and of the server, which share the machine: where the two together are busy all the time, the ratio of elapsed
time is that of CPU time.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import results_files
from machine import machine

from fxc.cache import Artifact, Cache, Remote, Trust, key
from fxc.cache.files import sync_all
from fxc.manifest import Binary, Manifest
from fxc.spec import ModelSpec, Spec
from fxc.target import Target

HERE = Path(__file__).parent
SERVER = HERE.parent / "tests/cache/s3_server.py"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--binaries", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=320_000)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, "-W", "ignore", str(SERVER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
                "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
            }  # fmt: skip
            write(measure(folder, server.pid, options.binaries, options.bytes, options.turns))
        finally:
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, server: int, binaries: int, size: int, turns: int) -> dict[str, Any]:
    bucket = f"bucket-{uuid.uuid4()}"
    remote = Remote.open(f"s3://{bucket}/fxc")
    remote.fs.mkdir(bucket)
    artifact = make(Cache.open(folder / "cache", {}), folder, binaries, size)
    pushed = timed(lambda: remote.push(artifact, [], False, lambda count: None))
    remote.fs.pipe_file(f"{bucket}/file", os.urandom(binaries * size))
    remote.fs.pipe_file(f"{bucket}/small", os.urandom(size))
    found: list[dict[str, float]] = []
    for turn in range(turns):
        before = spent(server)
        file = timed(lambda: remote.fs.get_file(f"{bucket}/file", str(folder / "file")))
        between = spent(server)
        start = time.perf_counter()
        sync_all([folder / "file"])
        synced = file + time.perf_counter() - start
        start_pull = spent(server)
        pulled = timed(functools.partial(pull, Cache.open(folder / f"pulled-{turn}", {}), remote, artifact))
        after = spent(server)
        bare = timed(functools.partial(ask, remote, f"{bucket}/small", binaries))
        cpu = {
            "file_cpu": between[0] - before[0], "file_server_cpu": between[1] - before[1],
            "pull_cpu": after[0] - start_pull[0], "pull_server_cpu": after[1] - start_pull[1],
        }  # fmt: skip
        found.append({"file": file, "synced": synced, "pull": pulled, "requests": bare, "ratio": file / pulled, **cpu})
    return {
        "machine": machine("cpu"), "binaries": binaries, "bytes": binaries * size, "push_seconds": pushed,
        "turns": found,
    }  # fmt: skip


def spent(server: int) -> tuple[float, float]:
    """Seconds of CPU time, of this process and of the server."""
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return time.process_time(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pull(cache: Cache, remote: Remote, artifact: Artifact) -> None:
    cache.pull(remote, remote.manifest(artifact.manifest.hash), Trust(), lambda count: None)


def ask(remote: Remote, name: str, times: int) -> None:
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(remote.fs.cat_file, [name] * times):
            pass


def make(cache: Cache, folder: Path, count: int, size: int) -> Artifact:
    binaries: dict[str, Binary] = {}
    for index in range(count):
        data, name = os.urandom(size), key.digest(f"piece {index}")
        (folder / "library").write_bytes(data)
        binaries[name] = Binary(piece="p", range="n=1", bytes=size, sha256=key.sha256(data), seconds=1.0)
        cache.store_binary(name, {f"{name}.so": folder / "library"}, binaries[name])
    manifest = Manifest(
        hash=key.digest("artifact"), fxc="", created="2026-01-01T00:00:00+00:00", model="Made",
        spec=Spec(model=ModelSpec(target="made.py:Made"), device="cpu", inputs={}),
        target=Target(device="cpu", arch="x86_64", cpu_features=(), torch=""),
        factors=(), inputs=(), outputs="y", weights=(), constants=(), programs=(), pieces={}, binaries=binaries,
    )  # fmt: skip
    return cache.publish(manifest, "rank_0_0", {"transformed_code.py": b"x = 1\n"}, binaries)


def timed(call: Callable[[], object]) -> float:
    os.sync()  # what others have written is not written through in this time
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write(result: dict[str, Any]) -> None:
    turns = result["turns"]
    rows = [
        ("one file, s3fs", spread(turn["file"] for turn in turns), ""),
        ("the same, written through to the disk", spread(turn["synced"] for turn in turns), ""),
        ("the artifact, fxc", spread(turn["pull"] for turn in turns), spread(turn["ratio"] for turn in turns)),
        (f"{result['binaries']} bare requests", spread(turn["requests"] for turn in turns), ""),
    ]
    ratio, cpu = (
        spread(
            (turn["file_cpu"] + turn["file_server_cpu"]) / (turn["pull_cpu"] + turn["pull_server_cpu"])
            for turn in turns
        ),
        [spread(turn[f"{what}_cpu"] for turn in turns) for what in ("file", "file_server", "pull", "pull_server")],
    )
    title = (
        f"{result['binaries']} binaries, {result['bytes'] / 1e6:.0f} MB, {len(turns)} turns: median (lowest to highest)"
    )
    text = f"{title}\n\n| | seconds | of the file's speed |\n|---|---|---|\n"
    text += "".join(f"| {name} | {seconds} | {ratio} |\n" for name, seconds, ratio in rows)
    text += (
        "\n| CPU seconds | of the client | of the server | file / artifact |\n|---|---|---|---|\n"
        f"| one file | {cpu[0]} | {cpu[1]} | |\n| the artifact | {cpu[2]} | {cpu[3]} | {ratio} |\n"
    )
    results_files.save("pull", result, text.splitlines())
    print(text)


def spread(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


if __name__ == "__main__":
    main()
