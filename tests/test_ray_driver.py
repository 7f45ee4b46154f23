"""What becomes of jobs whose workers get lost, with tasks that are made up; see tests/e2e/test_ray.py for a cluster."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

ray: Any = pytest.importorskip("ray")

from ray import exceptions  # noqa: E402

from fxc import _ray, executors, ray_node  # noqa: E402
from fxc.errors import BuildError  # noqa: E402
from fxc.jobs import CheckJob, Cluster, Job, Message, Note, Refusal, Reply, UserOps  # noqa: E402
from tests.building import target  # noqa: E402
from tests.test_ray_node import compile_job  # noqa: E402


class Tasks:
    """In place of Ray: keeps what is asked, and ends it when it is told to."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
        monkeypatch.setattr(ray, "put", lambda data: data)
        self.said: list[Message] = []
        self.asked: list[ray_node.Request] = []
        self.chosen: dict[str, Any] = {}
        self.running: list[Future[bytes]] = []
        cluster = Cluster("", None, msgspec.structs.replace(target(), device=device), "c" * 32)
        self.driver = _ray.Driver(cluster, self.said.append)
        self.driver.run = self
        self.driver.share = 5
        self.job: Job = msgspec.structs.replace(compile_job(UserOps()), directory=str(tmp_path))

    def options(self, **options: Any) -> Tasks:
        self.chosen = options
        return self

    def remote(self, request: bytes, sources: bytes) -> Tasks:
        self.asked.append(msgspec.msgpack.decode(request, type=ray_node.Request))
        self.running.append(Future())
        return self

    def future(self) -> Future[bytes]:
        return self.running[-1]

    def start(self) -> None:
        task = _ray._Task(self.job)
        self.driver.tasks[self.job.id] = task
        self.driver._start(task)

    def end(self, outcome: ray_node.Answer | Exception) -> None:
        if isinstance(outcome, Exception):
            self.running[-1].set_exception(outcome)
        else:
            self.running[-1].set_result(msgspec.msgpack.encode(outcome))
        event = self.driver.ended.get(timeout=5)
        assert isinstance(event, tuple)
        self.driver._end(self.driver.tasks[event[0]], event[1])


DONE = ray_node.Done(Reply(0, 2.5, {"library": "made.so", "calls": "", "assumptions": []}), {"made.so": b"\x7fELF"})
LABEL = "piece_0 n=1..64"


def test_a_lost_worker_costs_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks(tmp_path, monkeypatch)
    tasks.start()
    tasks.end(exceptions.WorkerCrashedError())
    tasks.end(exceptions.LocalRayletDiedError())
    tasks.end(DONE)
    assert len(tasks.asked) == 3
    assert tasks.said == [
        Note(f"the Ray cluster lost a worker at {LABEL} (WorkerCrashedError): it is started again"),
        Note(f"the Ray cluster lost a worker at {LABEL} (LocalRayletDiedError): it is started again"),
        Reply(7, 2.5, {"library": str(tmp_path / "made.so"), "calls": "", "assumptions": []}),
    ]
    assert (tmp_path / "made.so").read_bytes() == b"\x7fELF"
    assert tasks.driver.tasks == {}
    assert tasks.chosen == {"num_cpus": 1, "num_gpus": 0, "max_retries": 0, "name": f"fxc compile {LABEL}"}


def test_one_that_is_lost_each_time_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks(tmp_path, monkeypatch)
    tasks.start()
    for _ in range(3):
        tasks.end(exceptions.OutOfMemoryError("killed by the memory monitor"))
    assert [type(message) for message in tasks.said] == [Note, Note, Refusal]
    refusal = tasks.said[-1]
    assert isinstance(refusal, Refusal)
    assert refusal.message == f"the Ray cluster lost a worker at {LABEL} (OutOfMemoryError), 3 times"


def test_answers_that_are_no_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks(tmp_path, monkeypatch)
    tasks.start()
    tasks.end(ray_node.Refused("Ray node a: its torch is another", "install it"))
    tasks.start()
    tasks.end(exceptions.RayTaskError("run", "Traceback\n  ...\n", ModuleNotFoundError("No module named 'fxc'")))
    assert tasks.said == [
        Refusal("Ray node a: its torch is another", "install it"),
        Refusal("a node of the Ray cluster cannot run fxc: ModuleNotFoundError: No module named 'fxc'", _ray.SAME),
    ]


def test_a_check_has_the_binary_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks(tmp_path, monkeypatch, device="cuda")
    (tmp_path / "made.so").write_bytes(b"library")
    (tmp_path / "made.json").write_bytes(b"calls")
    tasks.job = CheckJob(
        id=8, label=LABEL, text="", device="cuda", ops=UserOps(), library=str(tmp_path / "made.so"), points=(),
        lowest={}, share=64, values=(), directory=str(tmp_path),
    )  # fmt: skip
    tasks.start()
    assert tasks.asked[0].files == {"made.so": b"library", "made.json": b"calls"}
    assert isinstance(tasks.asked[0].job, CheckJob)
    assert tasks.asked[0].job.share == 5
    assert (tasks.chosen["num_gpus"], tasks.chosen["name"]) == (1, f"fxc check {LABEL}")


def test_a_client_whose_cluster_is_lost_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not at a task that raised such an error."""
    tasks = Tasks(tmp_path, monkeypatch)
    tasks.start()
    cause = ConnectionError("a disk on the network")
    tasks.end(exceptions.RayTaskError("run", "Traceback\n  ...\n", cause).as_instanceof_cause())
    message = "a node of the Ray cluster cannot run fxc: ConnectionError: a disk on the network"
    assert tasks.said == [Refusal(message, _ray.SAME)]
    tasks.start()
    with pytest.raises(ConnectionError, match="Failed to reconnect"):
        tasks.end(ConnectionError("Failed to reconnect"))


def test_how_a_cluster_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | None] = []
    said: list[Message] = []

    def init(address: str | None, **_: Any) -> None:
        calls.append(address)
        raise errors.pop()

    def refused(address: str) -> tuple[str, str]:
        driver = _ray.Driver(Cluster(address, None, target(), "c" * 32), said.append)
        with pytest.raises(BuildError) as caught:
            driver.connect()
        return caught.value.message, caught.value.hint

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    errors: list[Exception] = [ConnectionError("none found")]
    assert refused("") == ("the Ray cluster on this machine cannot be used: ConnectionError: none found", _ray.RUNS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        errors = [ConnectionError("client connection timeout"), ConnectionAbortedError("Starting failed")]
        message, hint = refused(address)
    assert message == f"the Ray cluster at {address} cannot be used: ConnectionError: client connection timeout"
    assert "RAY_AUTH_MODE=token" in hint
    again = "does not serve this build: ConnectionAbortedError: Starting failed; it is asked again"
    assert said == [Note(f"the Ray cluster at {address} {again}")]
    monkeypatch.setenv("RAY_ADDRESS", address)
    message, hint = refused("")
    assert message.startswith(f"there is no Ray cluster at {address}: ConnectionRefusedError")
    assert (hint, calls) == (_ray.RUNS, [None, address, address])


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ray", ""),
        ("ray:auto", "auto"),
        ("ray://auto", "auto"),
        ("ray:head.local:6379", "head.local:6379"),
        ("ray:[fd00::1]:6379", "[fd00::1]:6379"),
        ("ray://10.0.0.2:10001", "ray://10.0.0.2:10001"),
    ],
)
def test_what_ray_is_asked_for(name: str, address: str) -> None:
    executors.check(name)
    assert executors._address(name) == address


def test_an_address_at_which_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        _ray._require_reachable(where)
        _ray._require_reachable(f"ray://{where}")
    for address in (where, f"ray://{where}"):
        with pytest.raises(ConnectionRefusedError):
            _ray._require_reachable(address)
    for address in ("", "auto", "local"):
        _ray._require_reachable(address)
