"""Dimensions: arithmetic with sizes, sizes across cuts, branches."""

# mypy: disable-error-code="no-any-return, operator, index, dict-item"
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.zoo.model import Model, linear

TWO = {"x": "float32[batch, seq, 8]"}
TWO_DIMS = {"batch": (1, 9), "seq": (1, 33)}
TWO_CALLS = ((1, 1), (1, 33), (2, 3), (3, 2), (4, 4), (9, 1), (9, 33))


class BatchSeq(Model):
    """Two dimensions, and their product as the first size of what crosses a cut."""

    inputs, dims, calls = TWO, TWO_DIMS, TWO_CALLS

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        flat = self.lin(x).view(batch * seq, 8)
        y = torch.ops.zoo.mix(flat)
        z = torch.ops.zoo.mix(torch.relu(y))
        out: Tensor = z.view(batch, seq, 8) + x.mean(1, keepdim=True)
        return out


class SeqBatch(BatchSeq):
    """The dimensions' names sort the other way round."""

    inputs = {"x": "float32[zeta, alpha, 8]"}
    dims = {"zeta": (1, 9), "alpha": (1, 33)}


class ProductOnly(Model):
    """Behind the cut only the product is left; a number of rows and a mean need both sizes."""

    inputs, dims, calls = TWO, TWO_DIMS, TWO_CALLS

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        y = torch.ops.zoo.mix(flat)
        z = torch.ops.zoo.mix(y * x.shape[1])
        return z.unflatten(0, (x.shape[0], x.shape[1])), z + torch.arange(x.shape[0] * x.shape[1])[:, None]


class Ragged(Model):
    """An input with one entry more than there are requests, declared before the one that says how many there are."""

    inputs = {"starts": "int64[r + 1] 0..9", "x": "float32[n, 8]", "lengths": "int64[r] 0..9"}
    dims = {"n": (1, 64), "r": (1, 9)}
    calls = ((1, 1), (5, 2), (64, 9), (7, 3))

    def forward(self, starts: Tensor, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = torch.ops.zoo.mix(x + starts[-1])
        return y * starts.shape[0], starts[1:] - starts[:-1] + lengths


class SizeArguments(Model):
    """Sizes, and lists with sizes, as arguments of a cut."""

    inputs, dims, calls = TWO, TWO_DIMS, TWO_CALLS
    split = ("zoo::rows",)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        y = torch.ops.zoo.rows(x, batch * seq + 1, [seq // 2 + 1, batch, width])
        z = torch.ops.zoo.rows(y, max(seq, 4), [batch, seq, 8])
        return z * 2


class Arithmetic(Model):
    """Numbers made of sizes: halves, rests, maxima, quotients, in slices and as factors, across cuts."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        y = torch.ops.zoo.mix(x)
        half = n // 2
        first, second = y[:half], y[half:]
        scaled = y * (n % 2) + y / n + y * max(n, 4) + min(n, 7) + n**2 - n / 3
        z = torch.ops.zoo.mix(scaled)
        return first, second, z * (n // 3), y.new_full((half + 1,), n), torch.arange(n) * half


class Halves(Model):
    """Tensors of n // 2 rows and of 2 n rows cross a cut."""

    dims = {"n": (2, 64)}
    calls = ((2,), (3,), (16,), (63,), (64,))

    def forward(self, x: Tensor) -> Tensor:
        half = torch.ops.zoo.mix(x[: x.shape[0] // 2])
        double = torch.ops.zoo.mix(torch.cat([x, x + 1]))
        return double[: x.shape[0]] + half.sum(0) + half.shape[0]


class Pairs(Model):
    """reshape(-1, 2, 8): n must be even; only even sizes are promised by shape 2 n."""

    inputs = {"x": "float32[n, 2, 8]"}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x.reshape(-1, 8))
        return y.reshape(-1, 2, 8).sum(1) + x.shape[0]


class Arange(Model):
    """Tensors made from a size alone, on both sides of a cut."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)
        y = torch.ops.zoo.mix(x)
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
        z = torch.ops.zoo.mix(y)
        scores = (z @ y.t()).masked_fill(~mask, float("-inf")).softmax(-1)
        return scores @ y + positions[:, None]


class Equal(Model):
    """Two dimensions that may be, but need not be, equal."""

    inputs = {"x": "float32[n, 8]", "y": "float32[m, 8]"}
    dims = {"n": (1, 32), "m": (1, 32)}
    calls = ((1, 1), (3, 3), (2, 5), (32, 1), (1, 32), (32, 32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([x, y])
        z = torch.ops.zoo.mix(both)
        return z[: x.shape[0]] @ z[x.shape[0] :].t()


class Width(Model):
    """The number of tokens meets every static width."""

    inputs = {"x": "float32[n, 37]"}
    calls = ((37,), (8,), (1,), (64,))

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(37, 41)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(self.lin(x))
        return y


class NamedLikeInput(Model):
    """Dimensions named as inputs, as modules, as built-in functions, as torch's own symbols."""

    inputs = {"n": "float32[n, s0]", "torch": "float32[step_0, len]"}
    dims = {"n": (1, 32), "s0": (2, 9), "step_0": (1, 5), "len": (1, 5)}
    calls = ((1, 2, 1, 1), (5, 3, 2, 4), (32, 9, 5, 5))
    split = ("zoo::rows",)

    def forward(self, n: Tensor, torch: Tensor) -> Tensor:
        import torch as t

        y = t.ops.zoo.rows(n, torch.shape[0] + n.shape[0], [n.shape[0] + 1, n.shape[1], torch.shape[1]])
        z = t.ops.zoo.rows(y, max(n.shape[0], torch.shape[1]), [2 * n.shape[1]])
        out: Tensor = z * torch.sum() + n.shape[0]
        return out


class FromZero(Model):
    """An empty batch is promised."""

    dims = {"n": (0, 64)}
    calls = ((0,), (1,), (2,), (64,))

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu(torch.ops.zoo.mix(self.lin(x)))
        return y


class OneSize(Model):
    """A dimension with one value, beside a real one."""

    inputs = {"x": "float32[one, n, 8]"}
    dims = {"one": (1, 1), "n": (1, 64)}
    calls = ((1, 1), (1, 5), (1, 64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x.squeeze(0))
        return y.unsqueeze(0) * x.shape[0] + x.shape[1]


class Static(Model):
    """No dimension at all."""

    inputs = {"x": "float32[3, 8]"}
    dims = {}
    calls = ((),)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        return y + x.shape[0]


class BranchAbove(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[0] > 8 else y - 1

    calls = ((1,), (2,), (8,), (9,), (64,))


class BranchOne(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[0] == 1 else y - 1


class BranchSpecial(Model):
    """One inner size has a path of its own."""

    calls = ((1,), (19,), (20,), (21,), (64,))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[0] == 20 else y - 1


class BranchTwice(Model):
    calls = ((1,), (3,), (4,), (15,), (16,), (64,))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        if x.shape[0] < 4:
            return y - 1
        return y * 2 if x.shape[0] < 16 else y.relu()


class BranchOnPart(Model):
    """The condition is about a slice."""

    calls = ((1,), (9,), (10,), (11,), (64,))

    def forward(self, x: Tensor) -> Tensor:
        rest = x[: x.shape[0] // 2]
        y = torch.ops.zoo.mix(x)
        return y * 2 if rest.shape[0] >= 5 else y - 1


class BranchInside(Model):
    """Another path at one value in the middle of the second of two dimensions."""

    inputs = {"x": "float32[batch, tokens, 8]"}
    dims = {"batch": (1, 32), "tokens": (1, 512)}
    calls = ((1, 1), (4, 128), (4, 127), (32, 512), (1, 128))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[1] == 128 else y - 1


class BranchFar(Model):
    """One value far from the lowest."""

    dims = {"n": (1, 40_000)}
    calls = ((1,), (7,), (20_000,), (19_999,))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[0] == 20_000 else y - 1


class Never(Model):
    """A size that the model refuses."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 7:
            raise ValueError("seven rows are too many")
        return x


class BranchConstants(Model):
    """Each side of a branch makes a constant of its own, which torch names like the other's."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 8:
            t = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        else:
            t = torch.tensor([0.5, 0.25, 0.5, 0.25, 0.5, 0.25, 0.5, 0.25])
        y: Tensor = torch.ops.zoo.mix(x * t)
        return y + t


class BranchTables(Model):
    """Which of two tensors is read depends on the size."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.linspace(1, 2, 8)
        self.many = torch.linspace(3, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x * (self.one if x.shape[0] == 1 else self.many))
        return y


class Squeezed(Model):
    """squeeze removes the dimension when it is 1; the result's rank depends on n."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        return y.squeeze() * 2


class SqueezedAxis(Model):
    """Broadcasting after squeeze(0): the numbers are the same on both sides, the rank is not."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        return y.squeeze(0) + y.sum(0)


class Broadcasts(Model):
    """x[:n - 1] is empty at 1; x * y broadcasts where both are 1."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        return y - y.mean(0, keepdim=True) + y[:-1].sum(0)


class BranchOfTwo(Model):
    """Branches in one dimension of two."""

    inputs, dims, calls = TWO, TWO_DIMS, (*TWO_CALLS, (1, 8), (2, 8), (2, 9))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[1] > 8 else y - 1


class BranchCorner(Model):
    """Only the shape (1, 1) is special."""

    inputs, dims, calls = TWO, TWO_DIMS, TWO_CALLS

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[0] == 1 and x.shape[1] == 1 else y - 1


class BranchOfEach(Model):
    """A branch in each of two dimensions."""

    inputs, dims, calls = TWO, TWO_DIMS, (*TWO_CALLS, (1, 8), (2, 8), (2, 9), (4, 9), (5, 8), (5, 9))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.zoo.mix(x)
        y = y * 2 if x.shape[1] > 8 else y - 1
        return y.relu() if x.shape[0] > 4 else y


class Padded(Model):
    """Rows are added up to a multiple of 8, and cut off again."""

    calls = ((1,), (7,), (8,), (9,), (64,))

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[0] % 8
        y = torch.ops.zoo.mix(F.pad(x, (0, 0, 0, missing)))
        return y[: x.shape[0]]


class EmptySlice(Model):
    """Last rows, however few there are."""

    calls = ((1,), (3,), (4,), (5,), (64,))

    def forward(self, x: Tensor) -> Tensor:
        tail = x[-4:]
        y: Tensor = torch.ops.zoo.mix(tail)
        return y + tail.shape[0]


class Interpolated(Model):
    """float arithmetic with a size, and math functions of it."""

    def forward(self, x: Tensor) -> Tensor:
        import math

        y: Tensor = torch.ops.zoo.mix(x)
        return y * math.sqrt(x.shape[0]) + int(x.shape[0] * 1.5) + math.log2(8)


# --- models that cannot be right for all they promise: the error must say why --------------------------------------


class BranchOdd(Model):
    """Another path for every odd n: more ranges than there may be."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[0] % 2 else y - 1


class BranchOfBoth(Model):
    """A branch on the product of two dimensions is no box."""

    inputs, dims = TWO, TWO_DIMS

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.zoo.mix(x)
        return y * 2 if x.shape[0] * x.shape[1] > 64 else y - 1


class DataDependent(Model):
    """A branch on values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class DataSized(Model):
    """A tensor whose size depends on data crosses a cut."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        y: Tensor = torch.ops.zoo.mix(kept * 2)
        return y


class ItemAcross(Model):
    """A number read out of a tensor crosses a cut."""

    def forward(self, x: Tensor) -> Tensor:
        k = int(x.argmax().item())
        y: Tensor = torch.ops.zoo.mix(x)
        return y + k


class ItemToOp(Model):
    """A number read out of a tensor is an argument of a splitting op."""

    split = ("zoo::rows",)

    def forward(self, x: Tensor) -> Tensor:
        k = int(x.argmax().item())
        y: Tensor = torch.ops.zoo.rows(x, k, [8])
        return y


class FixedSize(Model):
    """n is tied to a width."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(11, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w


class Numpy(Model):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(x.detach().numpy().sum())
