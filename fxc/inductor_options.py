"""Inductor's configuration for a piece."""

from __future__ import annotations

from typing import Any

from fxc.target import Target

BY_RULES: dict[str, Any] = {
    "benchmark_fusion": False,
    "benchmark_kernel": False,
    "coordinate_descent_tuning": False,
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "triton.autotune_at_compile_time": True,
    "triton.autotune_cublasLt": False,
    "triton.autotune_pointwise": False,
    "triton.autotune_with_sample_inputs": False,
}
"""Leaves to Inductor's rules what it would time. Its generated code for choosing still runs, as kernels are compiled
there; on fake tensors."""


def options(level: int, is_size: bool, target: Target, *, clock: bool = True) -> dict[str, Any]:
    """Inductor's configuration; every entry is part of the key.

    Args:
        clock: whether kernels can be timed, on the device that they are for.
    """
    chosen: dict[str, Any] = {
        "aot_inductor.package": False,
        "aot_inductor.precompile_headers": False,  # ours, in _torch_build, cost less
        "compile_threads": 1,  # each job is a process already
        "cpp.vec_isa_ok": target.device == "cpu",  # else each extension is test-compiled, up to a minute in all
        "cpp.dynamic_threads": True,  # else the builder's number of cores is written into the binary
        "cpp.threads": 16,  # else that number decides which loops run in parallel
        "fallback_random": True,  # the same random numbers as eager
    }
    if target.device == "cuda":
        chosen |= {
            "aot_inductor.embed_kernel_binary": True,
            "shape_padding": False,  # else a matrix of odd width comes out as a slice of a wider one: other strides
        }
    if not clock:
        chosen |= BY_RULES
    elif level >= 3 and is_size:
        chosen |= {"max_autotune": True, "coordinate_descent_tuning": True}
    return chosen
