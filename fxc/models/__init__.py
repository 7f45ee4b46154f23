"""Where a model comes from: a Python target or a Hugging Face folder; how it becomes a module without weights."""

from __future__ import annotations

from fxc.models.instantiate import instantiate
from fxc.models.source import ModelSource, cache_inputs, expected_ops, resolve, stored_names

__all__ = ["ModelSource", "cache_inputs", "expected_ops", "instantiate", "resolve", "stored_names"]
