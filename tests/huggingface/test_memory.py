"""Tracing needs no memory for weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 500000.0,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
SMALL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}

TRACE = """
import json, resource, sys
from pathlib import Path
from fxc import machine
from fxc.plan import make_plan
from fxc.spec import load_spec
plan = make_plan(load_spec(Path("model.yaml")), Path("."), machine.probe("cpu"))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weights = sum(2 * eval("*".join(map(str, weight.shape))) for weight in plan.manifest.weights)
print(json.dumps([peak / 2**20, weights / 2**30, plan.pieces, plan.unique, plan.seconds]))
"""


@pytest.mark.parametrize(("changes", "weights"), [(SMALL, 15.0), (LARGE, 131.4)], ids=["8B", "70B"])
def test_tracing_the_shape_of_a_large_llama(tmp_path: Path, changes: dict[str, Any], weights: float) -> None:
    """The whole process stays under 1 GiB, imports and all."""
    if changes is LARGE and not os.environ.get("FXC_TEST_ALL"):
        pytest.skip("FXC_TEST_ALL is not set")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    (tmp_path / "model.yaml").write_text("model: {huggingface: .}\ndevice: cpu\ncompile: {level: 1}\n")
    out = subprocess.check_output([sys.executable, "-c", TRACE], cwd=tmp_path, text=True)
    peak, gigabytes, pieces, unique, seconds = json.loads(out)
    print(f"{peak:.2f} GiB at the peak, {seconds}")
    assert gigabytes == pytest.approx(weights, abs=0.1)
    assert (pieces, unique) == (2 * changes["num_hidden_layers"] + 1, 3)
    assert peak < 1
