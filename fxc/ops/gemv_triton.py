"""Launches the kernel of `fxc::gemv`, on tensors or while tracing."""

from __future__ import annotations

from torch import Tensor

from fxc.ops import gemv_kernels as kernels
from fxc.ops.paged_triton import Call, run

WIDE = 8192
"""Rows up to here are read by four warps at once; longer ones by one warp in many steps, several in flight. Measured on
an H200 with the shapes of Llama-3.1-8B: 4.0 to 4.65 TB/s, where cuBLAS reads 2.3 to 4.4."""


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, call: Call = run) -> Tensor:
    """`fxc::gemv` by its kernel; arguments are taken as checked."""
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n))
    tile, warps, stages = (2048, 4, 1) if k <= WIDE else (512, 1, 4)
    call(
        kernels.multiply, (n,), x, weight, weight if bias is None else bias, out, weight.stride(0),
        K=k, TILE=tile, BIAS=bias is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
