"""Builds on a Ray cluster: two nodes on this machine, each with a cache of its own as if they shared no disk."""

from __future__ import annotations

import json
import os
import signal
import socket
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
pytestmark = pytest.mark.filterwarnings(r"ignore:[\s\S]*ray_client_server:pytest.PytestUnraisableExceptionWarning")
slow = pytest.mark.skipif(not TORTURE, reason="minutes on two cores: set FXC_TORTURE=1")


class Nodes:
    """A cluster of a head and of nodes that come and go."""

    def __init__(self, folder: Path, compiled: Path) -> None:
        self.folder = folder
        self.compiled = compiled
        self.caches: dict[str, Path] = {}
        self.cluster = cluster_utils.Cluster()
        with socket.create_server(("", 0)) as server:
            self.port = server.getsockname()[1]
        self.head = self.add("head", ray_client_server_port=self.port)

    def add(self, name: str, **more: Any) -> Any:
        """A node that runs one job at a time, with compiler headers in its cache."""
        self.caches[name] = world.copy_cache(self.compiled, self.folder / name, scratch=True)
        own = {"FXC_CACHE_DIR": str(self.caches[name]), "RAY_USAGE_STATS_ENABLED": "0"}
        return self.cluster.add_node(
            num_cpus=1, num_gpus=0, object_store_memory=80 << 20, include_dashboard=False, env_vars=own, **more
        )

    @property
    def executor(self) -> tuple[str, str]:
        return ("--executor", f"ray:{self.cluster.address}")

    @property
    def client(self) -> tuple[str, str]:
        """The same through Ray's client server."""
        return ("--executor", f"ray://{self.head.node_ip_address}:{self.port}")

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
    tokens = pytest.MonkeyPatch()
    tokens.setenv("RAY_AUTH_MODE", "disabled")
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
        tokens.undo()


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
def test_from_outside(nodes: Nodes, plain: Built, fresh: Fresh) -> None:
    project = fresh()
    result = project.build(*nodes.client)
    assert (result["hash"], result["binaries"]) == (plain.hash, {"compiled": 1, "reused": 0})
    assert project.settle(20) == []


@slow
@pytest.mark.parametrize("way", ["executor", "client"])
def test_interrupted(nodes: Nodes, fresh: Fresh, way: str) -> None:
    project = fresh()
    with project.start(*getattr(nodes, way)) as process:
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
    soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3", "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "3"}
    nodes.add("another")
    ways = (nodes.executor, nodes.client)
    inside, outside = fresh("inside", "inside-cache"), fresh("outside", "outside-cache")
    with inside.start(*ways[0], more=soon) as first, outside.start(*ways[1], more=soon) as second:
        nodes.wait_for(first, "head", "another")  # one job each
        nodes.cluster.shutdown()
        ended = [(process.communicate(timeout=200), process.returncode) for process in (first, second)]
    addresses = (ways[0][1].removeprefix("ray:"), ways[1][1])
    for project, executor, address, ((out, err), code) in zip((inside, outside), ways, addresses, ended, strict=True):
        error = json.loads(out)["error"]
        assert (code, error["kind"]) == (1, "BuildError"), err
        assert error["message"] == f"the Ray cluster {address} is lost"
        assert project.settle(20) == []
        done = project.fxc("build", str(project.yaml), "--json", *executor)
        assert (done.code, done.json["error"]["hint"]) == (1, "`ray status` shows whether it runs"), done


def test_names_of_executors(fresh: Fresh) -> None:
    project = fresh()
    for name in ("cloud", "ray:", "raylet", "ray:10.0.0.2", "ray://10.0.0.2", "ray:http://10.0.0.2:1"):
        done = project.fxc("build", str(project.yaml), "--executor", name)
        assert (done.code, done.err.splitlines()[0]) == (2, f"fxc: error: executor {name!r} is not known")
    code = "import sys; sys.modules['ray'] = None; from fxc import executors; executors.check('ray')"
    done = project.python(f"import fxc\ntry:\n    {code}\nexcept fxc.UsageError as e: print(e.message, '|', e.hint)")
    assert done.out == "executor ray needs the package ray, which is not installed | pip install 'fxc[ray]'\n"
