"""One real build from the command line, at level 0: no compiler is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MODEL = """
import torch

class Scale(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight
"""
SPEC = """
model: {target: ./scale.py:Scale, args: {width: 4}}
device: cpu
inputs: {x: {shape: [n, 4], dtype: float32}}
dims: {n: {min: 1, max: 64}}
compile: {level: 0}
"""
FXC = (sys.executable, "-m", "fxc")
NO_WORKERS = "import sys, fxc.pool; fxc.pool.Pool = None; from fxc.cli.main import run; sys.exit(run(sys.argv[1:]))"
LIST = (
    "import sys; from fxc.cli.main import run; code = run(sys.argv[1:]); print('torch' in sys.modules); sys.exit(code)"
)


def test_build_then_hit_without_torch_then_warm(tmp_path: Path) -> None:
    (tmp_path / "scale.py").write_text(MODEL)
    (tmp_path / "model.yaml").write_text(SPEC)
    environ = {**os.environ, "FXC_CACHE_DIR": str(tmp_path / "cache")}

    def spawn(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
        )

    missed = spawn(*FXC, "warm", "model.yaml", "--require-hit", "-q")
    assert (missed.returncode, missed.stdout) == (3, "")
    built = spawn(sys.executable, "-c", NO_WORKERS, "build", "model.yaml", "--json")
    assert built.returncode == 0, built.stderr
    result = json.loads(built.stdout)
    assert list(result) == [
        "hash", "path", "hit", "pieces", "unique_pieces", "binaries", "sizes", "seconds", "proof", "proved", "unproved", "passes", "verified",
    ]  # fmt: skip
    assert list(result["seconds"]) == ["trace", "partition", "compile", "prove", "publish", "total"]
    assert (result["hit"], result["sizes"]) == (False, [])
    assert Path(result["path"]).name == result["hash"]
    hit = spawn(sys.executable, "-c", LIST, "build", "model.yaml", "-q")
    assert hit.stdout == f"{result['hash']}\nFalse\n"
    warm = spawn(*FXC, "warm", "model.yaml", "--require-hit", "--json", "-q")
    assert warm.returncode == 0, warm.stderr
    assert json.loads(warm.stdout)["hash"] == result["hash"]
    assert warm.stderr == ""
