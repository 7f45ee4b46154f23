"""Graph passes: rewrites of a graph before it is cut, and of its pieces between the cut and the compiler, in the order
in which they run.

Collective passes (all-reduce with RMSNorm, sequence parallelism) will stand between the clean-up and the fusions.
"""

from __future__ import annotations

from fxc.passes.attention_quant import AttentionQuant
from fxc.passes.base import Fusion, NearMiss, New, Outcome, Pass
from fxc.passes.gated_quant import GatedQuant
from fxc.passes.manager import Ran, configure, enabled, identity, run, run_whole
from fxc.passes.match import Found
from fxc.passes.noop import NoOp
from fxc.passes.norm_quant import NormQuant
from fxc.passes.rope import NormRope
from fxc.passes.rope_write import RopeWrite
from fxc.passes.row_linear import RowLinear

__all__ = [
    "PIPELINE", "Found", "Fusion", "NearMiss", "New", "Outcome", "Pass", "Ran", "configure", "enabled", "identity",
    "run", "run_whole",
]  # fmt: skip

PIPELINE: tuple[type[Pass], ...] = (
    AttentionQuant,  # of the whole graph, as are all that stand before NoOp
    NoOp,  # first: what does nothing hides patterns
    NormQuant,
    GatedQuant,
    NormRope,
    RopeWrite,  # of what NormRope made
    RowLinear,
)
"""Passes that every build knows; a user's own run after them."""
