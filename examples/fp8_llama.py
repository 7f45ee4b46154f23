"""The decoder of tiny_llama.py with linear layers in FP8, as servers run it on Hopper and later.

Weights are float8_e4m3fn with a scale of their own; the input of a linear layer is quantised on the way in, by a scale
that is known beforehand, or by one for each token (then each row of the weight has one, too). Norms and gated
activations stand right before such a layer: passes make one kernel of each and the quantisation. On a CPU the same
graph runs, slowly.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_llama import MLP, Attention, TinyLlama
from torch import Tensor, nn

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


class FP8Linear(nn.Module):
    """x [tokens, inputs] to x @ weight.T [tokens, outputs], in x's dtype. No bias."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor

    def __init__(self, inputs: int, outputs: int, dynamic: bool = False) -> None:
        """`dynamic`: with a scale for each token, instead of `input_scale` for all."""
        super().__init__()
        self.dynamic = dynamic
        self.register_buffer("weight", torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn))
        self.register_buffer("weight_scale", torch.ones((1, outputs) if dynamic else ()))
        if not dynamic:
            self.register_buffer("input_scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.dynamic:
            scale = (x.float().abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-12)
        else:
            scale = self.input_scale
        return torch._scaled_mm(
            quantise(x, scale), self.weight.t(), scale_a=scale, scale_b=self.weight_scale, out_dtype=x.dtype
        )

    def load(self, weight: Tensor, input_scale: float = 1.0) -> None:
        """Quantise a weight [outputs, inputs]."""
        size = weight.float().abs()
        scale = (size.amax(-1, keepdim=True) if self.dynamic else size.amax()).clamp(min=1e-12) / LARGEST
        self.weight.copy_(quantise(weight, scale))
        self.weight_scale.copy_(scale.t())
        if not self.dynamic:
            self.input_scale.fill_(input_scale)


class FP8Llama(TinyLlama):
    """Takes and gives what TinyLlama does."""

    def __init__(self, dtype: str = "bfloat16", dynamic: bool = False, **shape: Any) -> None:
        super().__init__(**shape)
        self.to(getattr(torch, dtype))
        for owner in [module for module in self.layers.modules() if isinstance(module, (Attention, MLP))]:
            for name, linear in list(owner.named_children()):
                assert isinstance(linear, nn.Linear)
                setattr(owner, name, FP8Linear(linear.in_features, linear.out_features, dynamic))

    def load(self, model: TinyLlama, input_scale: float = 0.02) -> FP8Llama:
        """Take the weights of a model of the same shape, quantised where they are in FP8 here."""
        weights = model.state_dict()
        for name, module in self.named_modules():
            if isinstance(module, FP8Linear):
                module.load(weights.pop(f"{name}.weight"), input_scale)
        self.load_state_dict(weights, strict=False)
        return self
