"""Builds for GPUs that are not here, one cache for all; `--virtual-results FILE` keeps what came out."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxc
from fxc.cache import Cache
from fxc.manifest import Manifest

EXAMPLES = Path(__file__).parents[2] / "examples"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--virtual-results", metavar="FILE", help="write what was built for which device")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("virtual")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    made: list[dict[str, Any]] = []
    yield made
    if (file := request.config.getoption("--virtual-results")) and made:
        head = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "driver": torch.cuda.is_available(),
        }
        Path(file).write_text(json.dumps({**head, "builds": made}, indent=1) + "\n")


@pytest.fixture(scope="session")
def build(cache: Path, results: list[dict[str, Any]]) -> Callable[..., Manifest]:
    """`build("tiny_llama", "h200", "key=value", ...)`: the manifest."""
    made: dict[tuple[str, ...], Manifest] = {}

    def run(example: str, target: str, *overrides: str) -> Manifest:
        if (example, target, *overrides) not in made:
            every = ["device=cuda", "compile.sizes=[]", *overrides]
            result = fxc.build(EXAMPLES / f"{example}.yaml", overrides=every, target=target, cache_dir=cache)
            manifest = Cache.open(cache).artifact(result.hash).manifest
            kernels = [kernel for binary in manifest.binaries.values() for kernel in binary.kernels]
            results.append(
                {
                    "example": example,
                    "target": target,
                    "overrides": overrides,
                    "binaries": len(manifest.binaries),
                    "kernels": len(kernels),
                    "arch": sorted({kernel.arch for kernel in kernels}),
                    "spilling": sum(kernel.stack > 0 for kernel in kernels),
                    "checks": len(manifest.proof),
                    "needs": next((binary.needs for binary in manifest.binaries.values()), {}),
                    "seconds": {name: round(took, 1) for name, took in result.seconds.items()},
                }
            )
            made[example, target, *overrides] = manifest
        return made[example, target, *overrides]

    return run
