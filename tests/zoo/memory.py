"""Writes: into inputs, buffers, views of them, and intermediate tensors seen from both sides of a cut."""

# mypy: disable-error-code="no-any-return, operator, index, dict-item"
from __future__ import annotations

import torch
from torch import Tensor

from tests.zoo.model import Model, linear

CACHE = {"x": "float32[n, 8]", "slots": "int64[n] 0..64", "cache": "float32[64, 8]"}


class AddsToInput(Model):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class ReturnsWritten(Model):
    """Results that are the written input, a view of it, and what an in-place op returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.mul_(3)
        return x, x[0], y


class IndexPut(Model):
    """Rows of a cache are overwritten, then read behind a cut."""

    inputs = CACHE

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        cache[slots] = self.lin(x).index_select(0, torch.zeros_like(slots))
        y: Tensor = torch.ops.zoo.mix(x)
        return y + cache.sum(0)


class NoResult(Model):
    """Nothing but a write."""

    inputs = CACHE

    def forward(self, x: Tensor, slots: Tensor, cache: Tensor) -> None:
        cache.index_add_(0, slots, x)


class WrittenBuffers(Model):
    """State: a persistent and a non-persistent buffer that count calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(8), persistent=False)
        self.register_buffer("same_at_first", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.total += x.sum(0)
        y: Tensor = torch.ops.zoo.mix(x)
        return y * self.count + self.total + self.same_at_first


class ViewOfInput(Model):
    """A view is taken, then written, on one side of a cut; the other view and the whole are read on the other side."""

    inputs = {"x": "float32[n, 8]", "cache": "float32[2, 64, 8]"}

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = cache[0], cache[1]
        flat = cache.view(-1)
        keys[: x.shape[0]] = x
        y = torch.ops.zoo.mix(x)
        values[: x.shape[0]].add_(y)
        z = torch.ops.zoo.mix(y)
        return flat.sum() + z, keys[: x.shape[0]] + z


class UnboundViews(Model):
    """Views that come as a list."""

    inputs = {"x": "float32[n, 8]", "cache": "float32[2, 64, 8]"}

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        keys, values = cache.unbind(0)
        torch.ops.zoo.write(keys, x)
        y = torch.ops.zoo.mix(x)
        torch.ops.zoo.write(values, y)
        return keys.sum() + values.sum() + y


class ViewOfIntermediate(Model):
    """A view of an intermediate tensor is written behind a cut; the whole is used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        left = h[:, :8]
        y = torch.ops.zoo.mix(x)
        left.mul_(2).add_(y)
        z = torch.ops.zoo.mix(y)
        return h[:, 8:] + left + z


class ChunkWritten(Model):
    """Parts of a tensor, written in place and passed to cuts, and the whole behind."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.lin(x)
        q, k, v = h.chunk(3, -1)
        q.mul_(0.5)
        y = torch.ops.zoo.mix(q)
        k += y
        z = torch.ops.zoo.mix(k)
        v.relu_()
        return h, torch.ops.zoo.mix(v) + z


class WritesIntoResult(Model):
    """The result of a cut, and a view of one, are written in place in the next piece and used in the one after."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        y[:, 0] = 1.0
        head = y[:, :4]
        z = torch.ops.zoo.mix(y)
        head.sub_(1)
        w: Tensor = torch.ops.zoo.mix(z)
        return y + z + w


class CloneThenWrite(Model):
    """A snapshot keeps the old values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = x.clone()
        x.add_(1)
        h = torch.ops.zoo.mix(x)
        snap = h.clone()
        torch.ops.zoo.write(h, snap)
        kept = h.clone()
        h.zero_()
        return before, kept + snap, h


class CopiesBetweenInputs(Model):
    inputs = {"x": "float32[n, 8]", "out": "float32[n, 8]"}

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        out.copy_(x * 2)
        x.fill_(7)
        return out


class MaskedWrite(Model):
    inputs = {"x": "float32[n, 8]", "mask": "bool[n]", "out": "float32[n, 8]"}

    def forward(self, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
        out[mask] = 0.0
        out.masked_fill_(~mask[:, None], 3.0)
        y: Tensor = torch.ops.zoo.mix(out + x)
        return y


class WritesSeveral(Model):
    """One op that writes two tensors and returns another; one that writes a list."""

    inputs = {"x": "float32[n, 8]", "a": "float32[n, 8]", "b": "float32[n, 8]"}

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = x * 2
        y = torch.ops.zoo.write_both(a, h, x)
        torch.ops.zoo.write_all([b, h], y)
        return h + y


class WritesListOfViews(Model):
    inputs = {"x": "float32[n, 8]", "both": "float32[2, n, 8]"}

    def forward(self, x: Tensor, both: Tensor) -> Tensor:
        h = torch.stack([x, x + 1])
        torch.ops.zoo.write_all([both[0], h[1]], x)
        y: Tensor = torch.ops.zoo.mix(x)
        return h.sum(0) + y + both[1]


class SameMemory(Model):
    """`contiguous`, `to`, `reshape` and `detach` give the tensor itself; dropout of an evaluated model too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        same = x.contiguous().to(torch.float32).reshape(x.shape).detach()
        same.add_(1)
        y = torch.ops.zoo.mix(x)
        z = torch.nn.functional.dropout(y, 0.5, self.training)
        z.mul_(3)
        w = torch.ops.zoo.mix(z)
        return w, y


class TransposedWrite(Model):
    """In-place on a transposed view of an input, and squeeze, unsqueeze and expand views read after it."""

    inputs = {"x": "float32[8, 8]", "y": "float32[n, 8]"}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        wide = x.unsqueeze(0).expand(3, 8, 8)
        turned = x.t()
        z = torch.ops.zoo.mix(y)
        turned[0] = 5.0
        out: Tensor = torch.ops.zoo.mix(z)
        return out + wide.sum((0, 1)) + turned.sum(0)


class WrittenTwice(Model):
    """Reads and writes of one tensor alternate over three pieces."""

    inputs = {"x": "float32[n, 8]", "state": "float32[8]"}

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        a = x + state
        state.add_(1)
        b = torch.ops.zoo.mix(a) * state
        state.mul_(2)
        c = torch.ops.zoo.mix(b) - state
        state.sub_(c.sum(0) * 0.01)
        return c, state.clone()


class OutArgument(Model):
    inputs = {"x": "float32[n, 8]", "out": "float32[n, 8]"}

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        torch.add(x, 1, out=out)
        return out * 2


class SliceWritten(Model):
    """x[1:] += x[:-1], a chain of views, and n = 1, where both are empty."""

    def forward(self, x: Tensor) -> Tensor:
        x[1:] += x[:-1].clone()
        x[:, 2:][:, :2].zero_()
        y: Tensor = torch.ops.zoo.mix(x)
        return y


class MayCopy(Model):
    """`reshape`, `to` and `contiguous` that have to copy: later writes are not seen in what they gave."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        flat, wide, turned = x.t().reshape(-1), x.to(torch.float64), x.t().contiguous()
        y = torch.ops.zoo.mix(x)
        x.add_(1)
        z = torch.ops.zoo.mix(y)
        return flat + 1, wide + 1, turned + 1, z


class WrittenAttribute(Model):
    """A tensor that is a plain attribute is written; another one with the same numbers is not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(8)
        self.other = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        y: Tensor = torch.ops.zoo.mix(x)
        return y + self.seen + self.other
