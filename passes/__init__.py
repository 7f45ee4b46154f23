"""Graph passes, in the order in which they run."""

from __future__ import annotations

PIPELINE: tuple[str, ...] = ()
"""Names of the passes, the keys that `passes` in model.yaml may have. There are none yet."""
