"""What tests share: one cache with tiny_llama in it, built as a user builds it, and files of expected text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from fxc.plan import Plan

ROOT = Path(__file__).parent.parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell runs its background jobs so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Built(NamedTuple):
    environ: dict[str, str]
    """In it, `fxc` and `python` are this interpreter's, FXC_CACHE_DIR is the cache and HASH the artifact's."""
    log: str
    """What `fxc build` said on stderr."""

    def shell(self, script: str, *, both: bool = False) -> str:
        """stdout of a bash script that runs in the repository's root and must succeed; stderr too if `both`."""
        done = run(script, self.environ)
        return done.stdout + done.stderr if both else done.stdout


def run(script: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """examples/tiny_llama.yaml, built in an empty cache."""
    cache = tmp_path_factory.mktemp("examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "FXC_CACHE_DIR": str(cache)}
    done = run("fxc build examples/tiny_llama.yaml", environ)
    return Built({**environ, "HASH": done.stdout.strip()}, done.stderr)


GOLDENS = Path(__file__).parent / "goldens"


COMPILED = ("library", "compiled", "mixed", "built")
"""Fixtures of a session that compile: the tests that use one run in one process."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests stay together where several processes run them (`scripts/test`); those that take long begin."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        group = next((name for name in COMPILED if name in fixtures), item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args[0] not in COMPILED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what came into tests/goldens")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` must be what tests/goldens/<name> holds; `--update-golden` writes it there."""

    def check(name: str, text: str) -> None:
        path = GOLDENS / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no {path}: run pytest with --update-golden and read what it writes"
        assert text == path.read_text(encoding="utf-8"), f"not {path}: if it should change, run with --update-golden"

    return check


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the binaries of all probes and of the compiled models of the zoo, made by one pool of workers."""
    from fxc.cache import Cache
    from fxc.jobs import UserOps
    from fxc.lower import Lowering
    from fxc.plan import make_plan
    from fxc.pool import Pool
    from fxc.progress import Observer
    from tests import test_probes, test_zoo
    from tests.building import HERE, plan_of, target

    directory = tmp_path_factory.mktemp("compiled")
    with Pool(len(os.sched_getaffinity(0))) as pool:
        plans: list[Plan] = [plan_of(cls, level=2) for cls in test_zoo.COMPILED]
        plans += [make_plan(probe.spec(2), test_probes.PROBES, target()) for probe in test_probes.ALL.values()]
        ops = UserOps(tuple(dict.fromkeys(name for plan in plans for name in plan.ops.imports)), str(HERE))
        lowering = Lowering(Cache.open(directory), pool, Observer(), ops=ops, prove=True, force=False)
        lowering.run(unit for plan in plans for unit in plan.units)
    return directory
