"""The `fxc::` custom ops. Importing this package registers them; it imports torch and nothing else of weight."""

from __future__ import annotations

from fxc.ops.attention import attention
from fxc.ops.kv_write import kv_write
from fxc.ops.paged import paged_attention, paged_attention_out

__all__ = ["attention", "kv_write", "paged_attention", "paged_attention_out"]
