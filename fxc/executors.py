"""Where compile jobs run, by the name that a user gives it: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
import re
import sys

import msgspec

from fxc import identity
from fxc.cache import Cache
from fxc.errors import UsageError
from fxc.jobs import Cluster
from fxc.pool import Pool
from fxc.progress import Observer
from fxc.target import Target

LOCAL = "local"
_FORM = re.compile(r"ray(:(//)?(auto|\[[^\[\]/]+\]:[0-9]+|[^\[\]/:]+:[0-9]+))?")


def check(name: str) -> None:
    """Refuse what `start` could not start, before anything is traced.

    Raises:
        UsageError: no such executor, or ray is not installed.
    """
    if name == LOCAL:
        return
    if not _FORM.fullmatch(name):
        raise UsageError(
            f"executor {name!r} is not known", "write local, ray, ray:auto, ray:HOST:PORT or ray://HOST:PORT"
        )
    missing = "ray" if importlib.util.find_spec("ray") is None else ""
    if not missing and _address(name).startswith("ray://") and importlib.util.find_spec("grpc") is None:
        missing = "grpcio"
    if missing:
        raise UsageError(
            f"executor {name} needs the package {missing}, which is not installed", "pip install 'fxc[ray]'"
        )


def start(name: str, jobs: int | None, cache: Cache, observer: Observer, target: Target) -> Pool:
    """Have what runs jobs get ready.

    Args:
        name: `local`; `ray`, which is the cluster that RAY_ADDRESS names or that runs on this machine, else a new one
            of this machine alone; `ray:auto` and `ray:HOST:PORT`, a cluster that runs; `ray://HOST:PORT`, the same from
            outside of it.
        jobs: how many may run at a time; by default the cores of this machine or of the cluster, on CUDA its GPUs.
        cache: whose headers a cluster of this machine alone uses too.
        observer: hears of workers that were lost.
        target: what binaries are for, which must be what the nodes of a cluster find themselves.
    """
    if name == LOCAL:
        return Pool(jobs or len(os.sched_getaffinity(0)))
    address = _address(name)
    settings = Cluster(address=address, jobs=jobs, target=target, code=identity.own_code())
    environ = {
        "RAY_USAGE_STATS_ENABLED": "0",
        **os.environ,
        "RAY_ENABLE_AUTO_CONNECT": "0",  # a call after a cluster is lost would start one
        "FXC_CACHE_DIR": str(cache.root.parent),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    cluster = f"the Ray cluster {address}".rstrip()
    arguments = ("fxc._ray", msgspec.json.encode(settings).decode())
    return Pool(jobs, arguments, environ=environ, cluster=cluster, observer=observer)


def _address(name: str) -> str:
    """For `ray.init`."""
    address = name.partition(":")[2]
    if address.startswith("//") and address != "//auto":
        return name
    return address.removeprefix("//")
