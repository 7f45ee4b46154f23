"""Builds for GPUs that are not here, one cache for all; `--virtual-results FILE` keeps what came out."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxc
from fxc import machine, records
from fxc.cache import Cache
from fxc.manifest import Manifest

EXAMPLES = Path(__file__).parents[2] / "examples"


class Results:
    """What was built, by target and example, and how each test ended."""

    def __init__(self) -> None:
        self.targets: dict[str, dict[str, Any]] = {}
        self.tests: dict[str, str] = {}

    def built(self, example: str, target: str, overrides: tuple[str, ...], manifest: Manifest, seconds: float) -> None:
        kernels = [kernel for binary in manifest.binaries.values() for kernel in binary.kernels]
        self.targets.setdefault(target, {"device": records.find(target).name})[example] = {
            "overrides": overrides,
            "binaries": len(manifest.binaries),
            "kernels": len(kernels),
            "arch": sorted({kernel.arch for kernel in kernels}),
            "spilling": sum(kernel.stack > 0 for kernel in kernels),
            "checks": len(manifest.proof),
            "needs": machine.needs_of(manifest),
            "seconds": round(seconds, 1),
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid.rpartition("::")[2]] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        file = session.config.getoption("--virtual-results")
        whole = not session.config.getoption("keyword")  # else results of the rest would be lost
        if not file or not whole or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        told = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "compiler": machine.compiler_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "driver": torch.cuda.is_available(),
            "tests": self.tests,
            "targets": self.targets,
        }
        Path(file).write_text(json.dumps(told, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--virtual-results", metavar="FILE", help="write what was built for which device")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(), "virtual-results")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("virtual")


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest, cache: Path) -> Callable[..., Manifest]:
    """`build("tiny_llama", "h200", "key=value", ...)`: the manifest. Of an example, or of a model.yaml elsewhere."""
    results = request.config.pluginmanager.get_plugin("virtual-results")
    assert isinstance(results, Results)
    made: dict[tuple[str, ...], Manifest] = {}

    def run(example: str, target: str, *overrides: str) -> Manifest:
        if (example, target, *overrides) not in made:
            every = ["device=cuda", "compile.sizes=[]", *overrides]
            path = Path(example) if example.endswith(".yaml") else EXAMPLES / f"{example}.yaml"
            result = fxc.build(path, overrides=every, target=target, cache_dir=cache)
            manifest = Cache.open(cache).artifact(result.hash).manifest
            results.built(
                path.parent.name if example.endswith(".yaml") else example,
                target,
                overrides,
                manifest,
                result.seconds["total"],
            )
            made[example, target, *overrides] = manifest
        return made[example, target, *overrides]

    return run
