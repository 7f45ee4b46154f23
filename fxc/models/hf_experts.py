"""Mixture-of-experts layers of transformers models, in a form that traces for every number of tokens.

The stock loop over the experts that were hit depends on values; the stock grouped form is an op that only bfloat16
may trace, and falls back to an op of transformers' own, which a server would have to import. So: grouped for bfloat16,
and otherwise every expert on every token, weighted with zero where it was not chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "fxc"


def register() -> None:
    """Make the implementation known to transformers. Harmless when repeated."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, _experts)


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if hidden_states.dtype == torch.bfloat16:
        from transformers.integrations.moe import grouped_mm_experts_forward

        grouped: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return grouped
    first = "gate_up_proj" if self.has_gate else "up_proj"
    middle = _linear(self, first, hidden_states)
    middle = self._apply_gate(middle) if self.has_gate else self.act_fn(middle)
    out = _linear(self, "down_proj", middle)
    weights = top_k_weights.new_zeros(hidden_states.shape[0], self.num_experts)
    weights = weights.scatter_add(1, top_k_index, top_k_weights)
    return (out * weights.t()[:, :, None]).sum(0).to(hidden_states.dtype)


def _linear(experts: Any, name: str, x: Tensor) -> Tensor:
    """All experts' layer `name`: [tokens, in] or [experts, tokens, in] to [experts, tokens, out]."""
    weight: Tensor = getattr(experts, name)
    out = x @ (weight if experts.is_transposed else weight.transpose(1, 2))
    return out + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else out
