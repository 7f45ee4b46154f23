"""Pushing to and pulling from a server that speaks S3, in good and in bad weather."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fxc.cache import Artifact, Cache, Remote
from fxc.cache.transfer import Patience
from fxc.errors import CacheIOError, CacheMissError

from .conftest import HASH
from .test_remote import artifact, other, pull, push, size  # noqa: F401

needs_s3 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("s3fs", "moto", "flask")),
    reason="needs s3fs and moto[server]",
)
pytestmark = [
    needs_s3,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]
QUICK = Patience(tries=4, pause=0.01, stall=1.0, parallel=4)
Plan = Callable[..., None]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = Path(__file__).with_name("s3_server.py")
    command = [sys.executable, "-W", "ignore", str(server)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.kill()


@pytest.fixture
def bucket(port: int, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """A bucket of its own; the address and the keys come from the environment, as they do for users."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    name = f"bucket-{uuid.uuid4()}"
    remote = Remote.open(f"s3://{name}/fxc", QUICK)
    remote.fs.mkdir(name)
    return remote


@pytest.fixture
def plan(port: int) -> Plan:
    def put(*faults: tuple[str, Any]) -> None:
        data = json.dumps(faults).encode()
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/_faults", data, method="PUT")).close()

    return put


def test_there_and_back(artifact: Artifact, other: Cache, bucket: Remote) -> None:  # noqa: F811
    with pytest.raises(CacheMissError):
        pull(other, bucket)
    assert push(bucket, artifact) == size(artifact)
    assert bucket.has(artifact)
    assert push(bucket, artifact) == 0
    assert bucket.resolve(HASH[:5]) == HASH
    assert bucket.lookup("ab" * 16, lambda source: "1") == HASH
    taken, moved = pull(other, bucket)
    assert (taken.data, moved, taken.verify()) == (artifact.data, size(artifact), 4)


@pytest.mark.parametrize("faults", [[503, 503], ["stall"], ["cut"], ["cut", 503, "stall"]], ids=str)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_in_bad_weather(
    artifact: Artifact, other: Cache, bucket: Remote, plan: Plan, method: str, faults: list[Any]  # noqa: F811
) -> None:  # fmt: skip
    if method == "GET":
        push(bucket, artifact)
    plan(*[(method, fault) for fault in faults])
    if method != "GET":
        push(bucket, artifact)
    assert pull(other, bucket)[0].verify() == 4
    plan()


def test_no_bucket(artifact: Artifact, bucket: Remote, plan: Plan) -> None:  # noqa: F811
    plan()
    absent = Remote.open("s3://absent/fxc", QUICK)
    with pytest.raises(CacheIOError, match="cannot write packs/.* to s3://absent/fxc"):
        push(absent, artifact)
