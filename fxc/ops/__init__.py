"""The `fxc::` custom ops. Importing this package registers them; it imports torch and nothing else of weight."""

from __future__ import annotations

from fxc.ops.attention import attention

__all__ = ["attention"]
