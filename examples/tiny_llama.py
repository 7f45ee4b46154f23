"""A decoder of the Llama family in small, written as servers write it.

One flat batch of tokens goes in; query, key and value come from one matrix, gate and up from another, and the residual
is carried beside the normalised value. So all layers but the first and the last step give equal pieces, and each is
compiled once however many layers there are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import fxc.ops  # noqa: F401  registers fxc::attention


class RMSNorm(nn.Module):
    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normalised sum of both, and the sum: the next residual."""
        if residual is not None:
            x = x + residual
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight, x


class Rotary(nn.Module):
    """Cosines and sines of all positions; not in a checkpoint, so not persistent."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, base: float = 10000.0) -> None:
        super().__init__()
        frequency = base ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angle = torch.outer(torch.arange(max_positions).float(), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors [tokens, 1, head_dim / 2], to be broadcast over heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) of [tokens, heads, head_dim], in the precision of the tables."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        mixed = torch.ops.fxc.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        out: Tensor = self.out(mixed.flatten(1))
        return out


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(silu(gate) * up)
        return out


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden)
        self.attention = Attention(hidden, heads, kv_heads)
        self.mlp_norm = RMSNorm(hidden)
        self.mlp = MLP(hidden, intermediate)

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x = self.attention(x, cos, sin)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual


class TinyLlama(nn.Module):
    """Token ids and positions [tokens] to logits [tokens, vocab]; the tokens are one causal sequence."""

    def __init__(
        self,
        layers: int = 4,
        hidden: int = 256,
        heads: int = 8,
        kv_heads: int = 4,
        intermediate: int = 512,
        vocab: int = 1024,
        max_positions: int = 8192,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.rotary = Rotary(hidden // heads, max_positions)
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads, intermediate) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(positions)
        x: Tensor = self.embed(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        x, _ = self.norm(x, residual)
        logits: Tensor = self.lm_head(x)
        return logits
