"""Builds in several threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fxc

MODEL = "from torch import nn\n\n\nclass Double(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
YAML = """model: {target: ./double.py:Double}
device: cpu
inputs: {x: {shape: [n, 4], dtype: float32}}
dims: {n: {min: 1, max: 64}}
"""


def test_builds_in_threads(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(MODEL)
    (tmp_path / "model.yaml").write_text(YAML)

    def build(most: int) -> str:
        overrides = [f"dims.n.max={most}"]
        return fxc.build(tmp_path / "model.yaml", level=0, overrides=overrides, cache_dir=tmp_path / "cache").hash

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(build, [50, 51, 52, 50]))
    assert found[0] == found[3]
    assert len(set(found)) == 3
