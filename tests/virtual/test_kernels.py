"""What torch takes our kernels to write: it works on copies of the rest, and gives back what is written alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch built for CUDA")

SCRIPT = """
import json
import torch, triton
from torch._higher_order_ops.triton_kernel_wrap import identify_mutated_tensors
from triton.backends.compiler import GPUTarget
from fxc.ops import fp8_triton, paged_triton, rope_triton
from tests.ops.paged_cases import DECODE, MIXED, batch

class Absent:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0

triton.runtime.driver.set_active(Absent())
found = {}

def call(kernel, grid, *args, **options):
    given = {**dict(zip(kernel.arg_names, args)), **{k: v for k, v in options.items() if k in kernel.arg_names}}
    found.setdefault(label, []).append(identify_mutated_tensors(kernel, given, {}))

for label, case in (("mixed", MIXED), ("decode", DECODE)):
    paged_triton.attend(*batch(*case, width=128, dtype=torch.bfloat16, pad=3), call=call)
qkv, (cos, sin) = torch.randn(3, 48, 128), torch.randn(2, 3, 1, 64)
q, k, v, slots = qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], torch.arange(3)
caches = [torch.zeros(1, 16, 8, 128) for _ in range(2)]
for label, x in (("both", [q, k]), ("one", [k])):
    rope_triton.norm_rope(x, [], cos, sin, rotary=128, call=call)
    rope_triton.norm_rope_write(x, v, [], cos, sin, *caches, slots, rotary=128, call=call)
x, scale = torch.randn(8, 4096, dtype=torch.bfloat16), torch.tensor(1.0)
label = "fp8"
fp8_triton.norm(x, x, x[0], scale, eps=1e-5, call=call)
fp8_triton.norm(x, None, None, None, eps=1e-5, call=call)
fp8_triton.gated(x, x, scale, call=call)
fp8_triton.gated(x, x, None, group=128, call=call)
print(json.dumps(found))
"""


def test_what_is_written() -> None:
    """In a process of its own, as Triton is told of a device."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "mixed": [["parts", "sums"], ["out"], ["parts", "sums"], ["out"]],
        "decode": [["out"], ["out"]],
        "both": [["q_out", "k_out"], ["q_out", "k_cache", "v_cache"]],
        "one": [["q_out"], ["k_cache", "v_cache"]],
        "fp8": [["quantised", "total"], ["quantised", "scales"], ["quantised"], ["quantised", "scales"]],
    }
