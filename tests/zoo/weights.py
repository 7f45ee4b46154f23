"""Weights, buffers, constants."""

# mypy: disable-error-code="no-any-return, operator, index, dict-item"
from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.model import Model, linear


class Tied(Model):
    """One tensor under two names."""

    inputs = {"ids": "int64[n] 0..16"}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.ops.zoo.mix(self.embed(ids)))
        return out


class TiedBackwards(Model):
    """The name that the graph reads first is registered last, and the module itself is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.last = linear()
        self.first = self.last
        self.other = linear()
        self.other.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(torch.ops.zoo.mix(self.first(x))) + self.last(x)
        return out


class Buffers(Model):
    """Persistent, non-persistent, shared, 0-dimensional and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("again", self.scale)
        self.register_buffer("table", torch.linspace(0, 1, 512).view(64, 8), persistent=False)
        self.register_buffer("middle", torch.tensor(0.5), persistent=False)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.zoo.mix(x * self.again + self.table[: x.shape[0]])
        return out[:, self.order] * self.middle + self.scale


class BufferIsParameter(Model):
    """A persistent buffer that is a view of nothing, and a non-persistent one that is the same tensor as it."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.linspace(1, 2, 8)
        self.register_buffer("kept", shared)
        self.register_buffer("unsaved", shared, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.unsaved + self.kept


class Constants(Model):
    """Constants made in forward, before and after a cut, and a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.arange(8.0)
        self.many = [torch.full((8,), 2.0), torch.full((8,), 3.0)]

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        z: Tensor = torch.ops.zoo.mix(y * self.plain)
        return z * torch.tensor(2.0) + torch.tensor([1, 0] * 4) * self.many[1] + self.many[0]


class NamesCollide(Model):
    """Weights whose names become one when made into words, or are taken by the generated text."""

    inputs = {"torch": "float32[n, 8]", "step": "float32[n, 8]", "pieces": "float32[n, 8]", "x": "float32[n, 8]"}

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ParameterDict({"b": nn.Parameter(torch.randn(8)), "b_c": nn.Parameter(torch.randn(8))})
        self.a_b = nn.Parameter(torch.randn(8))
        self.a_b_1 = nn.Parameter(torch.randn(8))
        self.lin = linear()
        self.lin_weight = nn.Parameter(torch.randn(8))
        self.weights = nn.Parameter(torch.randn(8))
        self.register_parameter("x", nn.Parameter(torch.randn(8)))
        self.register_parameter("mix", nn.Parameter(torch.randn(8)))
        self.register_parameter("zoo_mix", nn.Parameter(torch.randn(8)))
        self.register_parameter("piece_0", nn.Parameter(torch.randn(8)))
        self.register_parameter("math", nn.Parameter(torch.randn(8)))
        self.register_parameter("inf", nn.Parameter(torch.randn(8)))
        self.register_parameter("class", nn.Parameter(torch.randn(8)))
        self.stack = nn.ParameterList([nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))])

    def forward(self, torch: Tensor, step: Tensor, pieces: Tensor, x: Tensor) -> Tensor:
        import torch as t

        y = torch + step * pieces + self.a["b"] * self.a_b + self.a_b_1 + self.a["b_c"]
        z: Tensor = t.ops.zoo.mix(self.lin(y) * self.lin_weight + self.weights)
        z = t.ops.zoo.mix(z * self.x + x) * self.mix + self.zoo_mix
        z = (z + self.piece_0) * self.math + self.inf + getattr(self, "class")
        out: Tensor = t.ops.zoo.pair(z, self.stack[1])[0]
        return out + self.stack[0]


class UsesLittle(Model):
    """Most of its weights are never read; one is read only for its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.randn(8))
        self.shape_only = nn.Parameter(torch.randn(8, 3))
        self.unused = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used + self.shape_only.shape[1]


class Dtypes(Model):
    """Parameters of several dtypes, one 0-dimensional, used on both sides of a cut."""

    inputs = {"x": "float16[n, 8]", "mask": "bool[n]", "ids": "int64[n] 0..8", "y": "bfloat16[n, 8]"}

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(8, dtype=torch.float16))
        self.wide = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = torch.ops.zoo.mix((x * self.narrow).to(torch.float64))
        b = a @ self.wide + self.wide[ids]
        c = torch.where(mask[:, None], b, float("-inf"))
        return c, (y * self.scale).to(torch.float32), ~mask & (ids > 3), ids // 2 + mask


class WeightViews(Model):
    """Slices and transposes of weights cross a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        top, turned = self.w[:8], self.w.t()
        y: Tensor = torch.ops.zoo.mix(x @ top)
        return y @ turned + torch.ops.zoo.mix(self.w[8:]).sum()


class Strided(Model):
    """A parameter and buffers that are not contiguous: views of wider memory, and transposed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 16).t()[::2])
        self.register_buffer("kept", torch.randn(16)[::2])
        self.register_buffer("unsaved", torch.linspace(-1, 1, 64).view(8, 8).t(), persistent=False)
        self.register_buffer("spread", torch.linspace(0, 1, 8).expand(64, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) * self.kept @ self.unsaved + self.spread[: x.shape[0]]


class StridedConstant(Model):
    """A tensor that is a plain attribute, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.randn(8, 2)[:, 1]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.plain
