"""`fxc::attention.paged` against attention written out in float64; its kernels too, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from fxc.errors import InputError
from fxc.ops import paged_attention, paged_attention_out
from fxc.ops.paged_plan import SMS, decide
from tests.ops.paged_cases import DECODE, MIXED, ONE, OPTIONS, SINKS, batch, written_out

BATCHES = {"mixed": MIXED, "decode": DECODE, "one": ONE}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_equals_attention_written_out(options: dict[str, Any], name: str, sinks: torch.Tensor | None) -> None:
    args = batch(*BATCHES[name], pad=3)
    out = paged_attention(*args, sinks, **options)
    torch.testing.assert_close(out.double(), written_out(*args, sinks, **options), rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()
    assert not out[int(args[-1][-1]) :].any()


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (96, 96), (128, 128), (256, 256), (24, 8), (192, 128)])
def test_head_and_block_sizes(block_size: int, width: int, value_width: int) -> None:
    args = batch([3, 1], [19, 34], width=width, value_width=value_width, block_size=block_size)
    torch.testing.assert_close(paged_attention(*args).double(), written_out(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (8, 1), (3, 3)])
def test_groups_of_heads(heads: int, kv_heads: int) -> None:
    args = batch(*DECODE, heads=heads, kv_heads=kv_heads)
    torch.testing.assert_close(paged_attention(*args).double(), written_out(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_kinds_of_number(dtype: torch.dtype) -> None:
    args = batch(*MIXED, dtype=dtype)
    out = paged_attention(*args, window=9)
    assert out.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(out.double(), written_out(*args, window=9), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inverse", [False, True], ids=["scale", "inverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_writes_fp8(name: str, dtype: torch.dtype, inverse: bool) -> None:
    """Within half a step of what float64 gives; what is too large is the largest; tokens of no request are zeros."""
    args = batch(*BATCHES[name], dtype=dtype, pad=3)
    for scale in (0.01, 1e-4):
        factor = torch.tensor(1 / scale if inverse else scale)
        out = paged_attention(*args, None, factor, window=9, output_inverse=inverse)
        assert out.dtype == torch.float8_e4m3fn
        right = (written_out(*args, window=9) / scale).clamp(-448, 448)
        step = torch.maximum(right.abs() / 16, torch.tensor(2.0**-10, dtype=torch.float64))
        assert bool(((out.double() - right).abs() <= step * 1.01).all())
        assert not out[int(args[-1][-1]) :].float().any()
    assert float(out.float().abs().max()) == 448


def test_writes_into_what_it_is_given() -> None:
    args = batch(*MIXED, pad=3)
    out = torch.full((args[0].shape[0], 4, 16), float("nan"))
    assert paged_attention_out(*args, window=9, out=out) is None
    torch.testing.assert_close(out, paged_attention(*args, window=9))


def test_blocks_that_left_the_window_may_be_anything() -> None:
    args = batch([2], [90])
    expected = paged_attention(*args, window=20)
    args[3][0, :4] = 1_000_000
    torch.testing.assert_close(paged_attention(*args, window=20), expected)


def _changed(**changed: Any) -> dict[str, Any]:
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_starts")
    return dict(zip(names, batch(*DECODE, pad=1), strict=True)) | changed


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("q", {"q": torch.zeros(4, 16)}, r"has 2 dimensions, expected \[tokens, heads, d\]"),
    ("k_cache", {"k_cache": torch.zeros(4, 16, 2, 8)}, "has width 8, expected 16"),
    ("k_cache", {"k_cache": torch.zeros(4, 16, 3, 16), "v_cache": torch.zeros(4, 16, 3, 16)}, "has 3 heads"),
    ("k_cache", {"k_cache": torch.zeros(4, 16, 16, 2).mT}, "has stride 2 in its last dimension"),
    ("v_cache", {"v_cache": torch.zeros(4, 16, 2, 16).half()}, "is torch.float16"),
    ("v_cache", {"v_cache": torch.zeros(4, 8, 2, 16)}, "has 8 slots in a block, expected 16"),
    ("block_table", {"block_table": torch.zeros(5, 3)}, "is torch.float32, expected torch.int32"),
    ("block_table", {"block_table": torch.zeros(4, 3).int()}, "has 4 rows, expected 5"),
    ("query_starts", {"query_starts": torch.zeros(5).int()}, "has 5 entries, expected 6"),
    ("sinks", {"sinks": torch.zeros(3)}, r"has shape \[3\]"),
    ("output_scale", {"output_scale": torch.ones(2)}, r"is torch.float32\[2\], expected one torch.float32"),
    ("window", {"window": 0}, "is 0"),
    ("scale", {"scale": -1.0}, "is -1.0"),
]


@pytest.mark.parametrize(
    ("argument", "changed", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refuses_by_name(argument: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"fxc::attention.paged: {argument} .*{message}"):
        paged_attention(**_changed(**changed))


def test_refuses_a_result_of_another_shape() -> None:
    with pytest.raises(InputError, match=r"fxc::attention.paged: out has shape \[4, 4, 15\]"):
        paged_attention_out(**_changed(out=torch.zeros(4, 4, 15)))


def test_schema_and_fake_agree_with_what_it_does() -> None:
    checks = ("test_schema", "test_faketensor")
    args = batch(*MIXED, value_width=8)
    torch.library.opcheck(paged_attention, (*args, SINKS), {"window": 9}, test_utils=checks)
    out = torch.empty(args[0].shape[0], 4, 8)
    torch.library.opcheck(paged_attention_out, args, {"chunk": 8, "out": out}, test_utils=checks)


@pytest.mark.parametrize("tokens", [1, 7, 8, 64, 2048, None])
@pytest.mark.parametrize("requests", [1, 8, 256, None])
@pytest.mark.parametrize("group", [1, 4, 7, 71])
def test_plans(tokens: int | None, requests: int | None, group: int) -> None:
    """Every request is some launch's, every tile holds a query, and there is work for the machine where there can be."""
    plan = decide(tokens, requests, heads=2 * group, kv_heads=2, d=128, dv=128, max_keys=8192)
    for launch in plan:
        assert launch.rows >= group
        assert launch.rows & (launch.rows - 1) == 0
        assert launch.splits >= 1
    if len(plan) == 2:
        assert [launch.by for launch in plan] == ["tile", "request"]
        assert plan[0].skip == plan[1].queries(group) > 0
    elif tokens is not None and requests is not None and tokens <= requests:
        assert plan[0].by == "token"
        assert tokens * 2 * plan[0].splits >= min(SMS, tokens * 2 * 64)
    else:
        assert plan[0].by == "tile"
        assert not plan[0].skip


def test_splits_never_outnumber_the_steps() -> None:
    (launch,) = decide(1, 1, heads=8, kv_heads=1, d=64, dv=64, max_keys=100)
    assert launch.splits <= -(-100 // launch.keys)


def test_importing_and_calling_needs_torch_alone() -> None:
    code = """
        import sys
        from tests.ops.paged_cases import MIXED, batch
        from fxc.ops import paged_attention
        paged_attention(*batch(*MIXED))
        unwanted = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers")
        print([name for name in unwanted if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


INTERPRETED = """
import sys
import torch, triton.runtime.interpreter as interpreter
# NumPy 2.4 makes no integer of an array with one element, which is what the interpreter's loops count with.
patch = interpreter._patch_lang_tensor
def patched(tensor, *rest):
    patch(tensor, *rest)
    interpreter_scope.append(tensor)
    tensor.__index__ = lambda self: int(self.handle.data.item())
interpreter_scope = []
interpreter._patch_lang_tensor = patched

from fxc.ops import kv_write, paged_triton
from fxc.ops.paged_plan import Launch
from tests.ops.paged_cases import DECODE, MIXED, SINKS, batch, written_out

def check(args, plan, sinks=None, **options):
    out = torch.full((args[0].shape[0], args[0].shape[1], args[2].shape[3]), float("nan"))
    paged_triton.attend(*args, sinks, **options, out=out, plan=plan)
    torch.testing.assert_close(out.double(), written_out(*args, sinks, **options), rtol=1e-5, atol=1e-5)

both = (Launch("tile", 32, 32, 1, 4, 2, skip=8), Launch("request", 16, 16, 2, 4, 2))
mixed, decode = (batch(*case, kv_heads=kv, pad=2, width=24, value_width=8) for case, kv in ((MIXED, 2), (DECODE, 1)))
check(mixed, both)
check(mixed, both, SINKS, window=9)
check(mixed, (Launch("tile", 16, 16, 3, 4, 2),), SINKS, chunk=8)
check(decode, None, softcap=2.0)
check(decode, (Launch("token", 16, 32, 1, 4, 2),), SINKS, window=20)
check(batch([30], [40], heads=6), None)

def check_fp8(args, plan, inverse=False, **options):
    args = (*args[:2], args[2] * 10, *args[3:])
    scale, out = torch.tensor(0.01), torch.full((*args[0].shape[:2], args[2].shape[3]), float("nan"))
    factor = 1 / scale if inverse else scale
    paged_triton.attend(*args, SINKS, factor, output_inverse=inverse, **options, out=out, plan=plan)
    right = (written_out(*args, SINKS, **options) / scale).clamp(-448, 448)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-3)

check_fp8(mixed, both, window=9)
check_fp8(mixed, (Launch("tile", 16, 16, 3, 4, 2),), inverse=True)

k, v = torch.randn(4, 2, 24), torch.randn(4, 2, 8)
caches = torch.zeros(3, 4, 2, 24), torch.zeros(3, 4, 2, 8)
expected = [cache.clone() for cache in caches]
slots = torch.tensor([11, -1, 0, 6])
paged_triton.write(k, v, *caches, slots)
kv_write(k, v, *expected, slots)
for found, right in zip(caches, expected):
    torch.testing.assert_close(found, right)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environ, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


class _Inputs(torch.nn.Module):
    def forward(self, *args: torch.Tensor) -> list[torch.Tensor]:
        return [arg * 1 for arg in args]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch.export's own
def test_kernels_are_traced_with_symbolic_sizes() -> None:
    """Nothing reads a tensor or guards a size: the launches stand in the graph, their grids computed from shapes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fxc.ops import paged_triton

    tokens, requests, blocks, width = (torch.export.Dim(name, min=1, max=4096) for name in ("t", "r", "b", "w"))
    dims = ({0: tokens}, {0: blocks}, {0: blocks}, {0: requests, 1: width}, {0: requests}, {0: requests + 1})
    program = torch.export.export(_Inputs(), batch(*MIXED), dynamic_shapes=(dims,))
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]

    def call(*args: torch.Tensor) -> torch.Tensor:
        return paged_triton.attend(*args, window=9, call=paged_triton.trace)

    with values[0].fake_mode:
        graph = make_fx(call)(*values)
    launches = [node for node in graph.graph.nodes if "triton_kernel_wrapper_mutation" in str(node.target)]
    assert len(launches) == 2
    assert [type(node.kwargs["grid"][0][0]) for node in launches] == [torch.fx.Node] * 2
    assert not any("item" in str(node.target) for node in graph.graph.nodes)
    assert str(values[0].shape[0]).startswith("s")
