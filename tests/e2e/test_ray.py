"""Builds on a Ray cluster: two nodes on this machine, each with a cache of its own as if they shared no disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import world
from tests.e2e.conftest import Built
from tests.e2e.world import TORTURE, Project

cluster_utils: Any = pytest.importorskip("ray.cluster_utils")
Fresh = Callable[..., Project]
slow = pytest.mark.skipif(not TORTURE, reason="minutes on two cores: set FXC_TORTURE=1")


class Nodes:
    """A cluster of a head and of nodes that come and go."""

    def __init__(self, folder: Path, compiled: Path) -> None:
        self.folder = folder
        self.compiled = compiled
        self.caches: dict[str, Path] = {}
        self.cluster = cluster_utils.Cluster()
        self.head = self.add("head")

    def add(self, name: str) -> Any:
        """A node that runs one job at a time, with compiler headers in its cache."""
        self.caches[name] = world.copy_cache(self.compiled, self.folder / name, scratch=True)
        own = {"FXC_CACHE_DIR": str(self.caches[name]), "RAY_USAGE_STATS_ENABLED": "0"}
        return self.cluster.add_node(
            num_cpus=1, num_gpus=0, object_store_memory=80 << 20, include_dashboard=False, env_vars=own
        )

    @property
    def executor(self) -> tuple[str, str]:
        return ("--executor", f"ray:{self.cluster.address}")

    def compiling(self, name: str) -> list[int]:
        """Processes of a node that run the host compiler."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    mine = os.fsencode(self.caches[name]) in (entry / "environ").read_bytes()
                    if mine and b"cc1plus" in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def wait_for(self, process: subprocess.Popen[str], *names: str) -> None:
        """Until these nodes run the host compiler."""
        while not all(map(self.compiling, names)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def nodes(mixed: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    for left in (2, 1, 0):  # Ray gives a node 30 s to start, which are too few on a busy machine
        try:
            made = Nodes(tmp_path_factory.mktemp("nodes"), mixed.project.cache)
            break
        except Exception:
            if not left:
                raise
    try:
        yield made
    finally:
        made.cluster.shutdown()


def parents(number: int) -> Iterator[int]:
    while number > 1:
        number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        yield number


@slow
def test_a_cluster_makes_what_this_machine_makes(nodes: Nodes, mixed: Built, fresh: Fresh, tmp_path: Path) -> None:
    """Custom ops of the user, which no node has, included; while a node dies, and a worker on the other."""
    project = world.mixed(tmp_path / "elsewhere", tmp_path / "built")
    second = nodes.add("second")
    with project.start(*nodes.executor) as process:
        nodes.wait_for(process, "head", "second")
        worker = next(
            number
            for number in parents(nodes.compiling("head")[0])
            if b"ray::" in Path(f"/proc/{number}/cmdline").read_bytes()
        )
        os.kill(worker, signal.SIGKILL)
        nodes.cluster.remove_node(second, allow_graceful=False)
        out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    lost = [line for line in err.splitlines() if line.startswith("the Ray cluster lost a worker at piece_")]
    assert len(lost) >= 2, err
    result = json.loads(out)
    assert (result["hash"], result["binaries"]) == (mixed.hash, {"compiled": 3, "reused": 0})
    there = [json.loads((b.artifact / "manifest.json").read_text()) for b in (mixed, Built(project, mixed.hash, 0))]
    assert there[0]["binaries"].keys() == there[1]["binaries"].keys()
    assert there[1]["proved"]
    assert project.fxc("verify", mixed.hash).code == 0
    assert project.settle(20) == []
    for where in (*nodes.caches.values(), project.cache):
        assert [path.name for path in (where / "v1" / "staging").glob("*/*.so")] == []


@slow
def test_a_node_with_another_compiler_is_refused(nodes: Nodes, fresh: Fresh, tmp_path: Path) -> None:
    other = tmp_path / "other-g++"
    other.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ (other) 99.1.0" || exec g++ "$@"\n')
    other.chmod(0o755)
    project = fresh()
    done = project.fxc("build", str(project.yaml), "--json", *nodes.executor, environ={"CXX": str(other)})
    assert (done.code, done.json["error"]["kind"]) == (1, "BuildError"), done
    here = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    message = done.json["error"]["message"]
    assert message.startswith("Ray node ")
    assert message.endswith(f": its compiler is 'g++ {here}', that of the machine that builds 'g++ 99.1.0'")


@slow
def test_interrupted(nodes: Nodes, fresh: Fresh) -> None:
    project = fresh()
    with project.start(*nodes.executor) as process:
        nodes.wait_for(process, "head")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, json.loads(out)["error"]["kind"]) == (130, "Interrupted"), err
    end = time.monotonic() + 30
    while nodes.compiling("head") and time.monotonic() < end:
        time.sleep(0.1)
    assert nodes.compiling("head") == []
    assert project.settle(20) == []


@slow
def test_a_cluster_that_is_lost(nodes: Nodes, fresh: Fresh) -> None:
    """Last: afterwards there is none."""
    project, executor = fresh(), nodes.executor
    with project.start(*executor, more={"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}) as process:
        nodes.wait_for(process, "head")
        nodes.cluster.shutdown()
        out, err = process.communicate(timeout=200)
    error = json.loads(out)["error"]
    assert (process.returncode, error["kind"]) == (1, "BuildError"), err
    assert error["message"] == f"the Ray cluster {executor[1].removeprefix('ray:')} is lost"
    assert project.settle(20) == []
    done = project.fxc("build", str(project.yaml), "--json", *executor)
    assert (done.code, done.json["error"]["hint"]) == (1, "`ray status` shows whether it runs"), done


def test_names_of_executors(fresh: Fresh) -> None:
    project = fresh()
    for name in ("cloud", "ray:", "raylet"):
        done = project.fxc("build", str(project.yaml), "--executor", name)
        assert (done.code, done.err.splitlines()[0]) == (2, f"fxc: error: executor {name!r} is not known")
    code = "import sys; sys.modules['ray'] = None; from fxc import executors; executors.check('ray')"
    done = project.python(f"import fxc\ntry:\n    {code}\nexcept fxc.UsageError as e: print(e.message, '|', e.hint)")
    assert done.out == "executor ray needs the package ray, which is not installed | pip install 'fxc[ray]'\n"
