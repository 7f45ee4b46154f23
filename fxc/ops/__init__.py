"""The `fxc::` custom ops. Importing this package registers them; it imports torch and nothing else of weight."""

from __future__ import annotations

from fxc.ops.attention import attention
from fxc.ops.kv_write import kv_write
from fxc.ops.paged import paged_attention, paged_attention_out

__all__ = ["COMPILED", "attention", "kv_write", "paged_attention", "paged_attention_out"]

COMPILED = {"fxc::attention.paged": paged_attention_out}
"""Ops whose CUDA kernels are Triton's, and what writes the result into a tensor that is handed over: a build makes a
binary of each call, so that a server compiles nothing, and the step decides where the result lies."""
