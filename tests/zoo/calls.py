"""Ops and how they are called: arguments of every kind, cuts in every place, random numbers, layouts."""

# mypy: disable-error-code="no-any-return, operator, index, dict-item"
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.zoo.model import Model, linear


class NoCut(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.lin(x))


class CutFirstAndLast(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        out: Tensor = torch.ops.zoo.mix(y.relu())
        return out


class CutsInARow(Model):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.zoo.mix(torch.ops.zoo.mix(torch.ops.zoo.mix(x)))
        return out


class OnlyViewBetween(Model):
    """Between two cuts there is nothing, or only a view, a getitem, a size."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        z = torch.ops.zoo.mix(y.view(y.shape[0], 2, 4))
        _, second = torch.ops.zoo.mix(z[:, 0]).chunk(2, -1)
        w: Tensor = torch.ops.zoo.mix(second)
        return w


class UnusedResults(Model):
    """The first result of a cut is never used, and all of another's; a third writes nothing and is dropped."""

    split = ("zoo::pair", "zoo::mix", "zoo::many")

    def forward(self, x: Tensor) -> Tensor:
        _, peak = torch.ops.zoo.pair(x, x + 1)
        torch.ops.zoo.pair(x * 2, x)
        torch.ops.zoo.many([x])
        return torch.ops.zoo.mix(x) + peak[:, None]


class TupleLater(Model):
    """Results of one cut are picked apart behind another."""

    split = ("zoo::pair", "zoo::many")

    def forward(self, x: Tensor) -> Tensor:
        both = torch.ops.zoo.pair(x, x)
        items = torch.ops.zoo.many([x, x * 2, both[0]])
        last = torch.ops.zoo.many([items[2], items[0]])
        return last[1] + both[1][:, None] + items[1]


class ChunksCross(Model):
    """Parts made before two cuts are used behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.lin(x).chunk(3, -1)
        a, b = x.split([3, 5], -1)
        y = torch.ops.zoo.mix(q)
        z = torch.ops.zoo.mix(y + k)
        return z * v + torch.cat([b, a], -1) + x.unbind(-1)[0][:, None]


class Options(Model):
    """A cut with keyword-only, text, list, optional, dtype and device arguments."""

    split = ("zoo::options",)

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        call = torch.ops.zoo.options
        a = call(x * 2, self.bias, mode='mul\'s "best"\\', scale=float("inf"), dims=[0, 1], flip=True, extras=[])
        b = call(a, None, dtype=torch.float64, device=x.device, extras=[None, self.bias, a])
        return a, b, call(b.float(), extras=[])


class OptionsInside(Options):
    """The same op called from inside a piece."""

    split = ("zoo::mix",)


class MadeOnDevice(Model):
    """New tensors on the device of the input: by a cut, by ops inside a piece, and by ops that nothing but sizes enter."""

    inputs = {"x": "float32[n, 8]", "device": "float32[n, 8]"}
    split = ("zoo::made",)

    def forward(self, x: Tensor, device: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ops.zoo.made(x, device=x.device)
        y = torch.ops.zoo.made(y + torch.arange(8, device=x.device), device=x.device)
        return y + torch.zeros(x.shape[0], 8, device=x.device), torch.ones(x.shape[0], device=x.device) + device[:, 0]


class ActInside(Model):
    """A custom op in a piece: it is called from the binary by name."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(torch.ops.zoo.act(self.lin(x)) + 1)
        return y * 2


class Noted(Model):
    """An op without result and without anything that it writes."""

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.zoo.note(x)
        y = x * 2
        torch.ops.zoo.note(y)
        return y


class NumbersInside(Model):
    """Infinite and undefined numbers, tiny and negative ones, complex ones, as arguments."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.masked_fill(x > 1, float("inf")).masked_fill(x < -1, float("-inf"))
        z = torch.ops.zoo.mix(torch.nan_to_num(y, nan=0.0, posinf=3.0, neginf=-1e-30))
        w = torch.where(z > 0, float("nan"), 1e30)
        return y, z, w, torch.clamp(x, min=-0.0, max=1e-7), torch.full((2,), float("nan"))


class Complex(Model):
    """Rotary embedding in complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(x.shape[0], 4), torch.arange(x.shape[0] * 4.0).view(-1, 4))
        rotated = torch.view_as_complex(x.view(-1, 4, 2)) * turns * (1 + 2j)
        y: Tensor = torch.ops.zoo.mix(torch.view_as_real(rotated).flatten(1))
        return y


class Types(Model):
    """dtype, device, layout and memory format as arguments."""

    inputs = {"x": "float32[n, 3, 4, 4]"}
    calls = ((1,), (2,), (5,))

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x.to(memory_format=torch.channels_last))
        z = torch.ops.zoo.mix(y)
        w = z.to(device=x.device, dtype=torch.float64).to(torch.bfloat16).float()
        e = torch.empty_like(w, dtype=torch.int32, memory_format=torch.contiguous_format).fill_(3)
        return w, y.contiguous(), e, torch.zeros(2, dtype=torch.int8, layout=torch.strided, device="cpu")


class Turned(Model):
    """Transposed, permuted and expanded tensors cross a cut, and a cut's result is transposed."""

    split = ("zoo::mix", "zoo::turned")

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(8, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.lin(x).view(-1, 2, 8)
        turned, wide = h.transpose(0, 1), x[:1].expand(3, 8)
        y = torch.ops.zoo.turned(x)
        z = torch.ops.zoo.mix(turned)
        return y + 1, z * turned, wide * 2, torch.ops.zoo.mix(y)


class Contexts(Model):
    """no_grad, enable_grad and disabled autocast blocks around a cut."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.ops.zoo.mix(x) + 1
        with torch.autocast("cpu", enabled=False):
            z = y.float() * 2
            w = torch.ops.zoo.mix(z)
        with torch.enable_grad():
            out: Tensor = w + 1
        return out


class Random(Model):
    """Random numbers on both sides of a cut: drawn at each call, the same as eager from the same seed."""

    seeded = True

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = torch.rand(x.shape[0], 8) + x
        y = torch.ops.zoo.mix(a)
        b = F.dropout(y, 0.5, training=True) + torch.randn_like(y)
        return b, torch.randint(0, 9, (3,)), torch.bernoulli(torch.full((4,), 0.5))


class Attends(Model):
    """SDPA, which draws random numbers for its dropout only."""

    def forward(self, x: Tensor) -> Tensor:
        y = x[None]
        return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)[0]


class AttendsWithDropout(Model):
    seeded = True

    def forward(self, x: Tensor) -> Tensor:
        y = x[None]
        return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.25)[0]


class Dropout(Model):
    """Dropout of an evaluated model does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(self.drop(self.norm(x)))
        return self.drop(y) + x


class Various(Model):
    """Ops with unusual schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.lstm_in = linear(8, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values, order = x.topk(3, dim=-1)
        y = torch.ops.zoo.mix(torch.einsum("nd,md->nm", x, x).softmax(-1) @ self.norm(x))
        ranked = torch.sort(y, dim=0, descending=True, stable=True)
        heads = self.lstm_in(y).view(1, -1, 3, 4).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, scale=0.5)
        return values, order, ranked.values, ranked.indices, mixed, F.one_hot(order, 8), x[..., None, :, None]


class Defaults(Model):
    """Arguments of forward that model.yaml does not give."""

    def forward(self, x: Tensor, scale: float = 2.0, bias: Tensor | None = None, *, flag: bool = True) -> Tensor:
        y = x * scale if flag else x
        return y if bias is None else y + bias


class OpenArguments(Model):
    inputs = {"x": "float32[n, 8]", "y": "float32[n, 8]"}

    def forward(self, x: Tensor, *args: Tensor, **more: Tensor) -> Tensor:
        assert not args
        return x * more["y"]


class AnyOrder(Model):
    """model.yaml names the arguments in another order than forward."""

    inputs = {"second": "float32[n]", "first": "float32[n, 8]"}

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(first)
        return y * second[:, None]


class EqualLayers(Model):
    """Three equal layers are two unique pieces: the first, and the rest between two cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.ops.zoo.mix(torch.relu(layer(x)))
        return x
