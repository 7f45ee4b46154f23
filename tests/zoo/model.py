"""What every model of the zoo says about itself, and the ops that their graphs are cut at."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """A model with its own model.yaml. A subclass without inputs of its own takes `x: float32[n, 8]`."""

    inputs: ClassVar[dict[str, str]] = {"x": "float32[n, 8]"}
    """Name -> `float32[n, 8]`, or `int64[n] 0..16` with the half-open range of made-up values."""
    dims: ClassVar[dict[str, tuple[int, int]]] = {"n": (1, 64)}
    split: ClassVar[tuple[str, ...]] = ("zoo::mix",)
    calls: ClassVar[tuple[tuple[int, ...], ...]] = ((1,), (2,), (5,), (16,), (64,))
    """Values of the dimensions to try, in order."""
    seeded: ClassVar[bool] = False
    """Draws random numbers: eager and program start from one seed."""

    @classmethod
    def spec(cls) -> dict[str, Any]:
        """model.yaml as data."""
        return {
            "model": {"target": f"{cls.__module__}:{cls.__name__}"},
            "device": "cpu",
            "inputs": {name: _input(text) for name, text in cls.inputs.items()},
            "dims": {name: {"min": low, "max": high} for name, (low, high) in cls.dims.items()},
            "partition": {"splitting_ops": list(cls.split)},
        }


def _input(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"(\w+)\[(.*?)\](?: (\S+)\.\.(\S+))?", text)
    assert match, text
    shape = [int(part) if part.isdigit() else part for part in filter(None, match[2].split(", "))]
    found: dict[str, Any] = {"shape": shape, "dtype": match[1]}
    return found | ({"values": [float(match[3]), float(match[4])]} if match[3] else {})


def linear(inner: int = 8, outer: int = 8) -> nn.Linear:
    return nn.Linear(inner, outer)


_LIBRARY = torch.library.Library("zoo", "DEF")


def op(schema: str, fake: Any = None) -> Any:
    """Define `zoo::<schema>` with the function as its kernel, which also tells shapes where there is no `fake`."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)

    def register(kernel: Any) -> Any:
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd" if fake is None else "CPU")
        if fake is not None:
            torch.library.register_fake(f"zoo::{name}", fake, lib=_LIBRARY)
        return kernel

    return register


@op("mix(Tensor x) -> Tensor")
def _mix(x: Tensor) -> Tensor:
    """The graph is cut here."""
    return x.cumsum(0) * 0.5


@op("pair(Tensor x, Tensor y) -> (Tensor, Tensor)")
def _pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.cumsum(0) + y, x.amax(-1)


@op("many(Tensor[] xs) -> Tensor[]")
def _many(xs: list[Tensor]) -> list[Tensor]:
    return [x.flip(0) + 1 for x in xs]


@op("write(Tensor(a!) out, Tensor x) -> ()", fake=lambda out, x: None)
def _write(out: Tensor, x: Tensor) -> None:
    """Adds the rows of x, last first, one after another to the rows of out: reads what it has written."""
    for row in range(min(out.shape[0], x.shape[0])):
        out[row].add_(x[row - 1])


@op("write_both(Tensor(a!) out, Tensor(b!) other, Tensor x) -> Tensor")
def _write_both(out: Tensor, other: Tensor, x: Tensor) -> Tensor:
    out.add_(x)
    other.mul_(2)
    return x + 1


@op("write_all(Tensor(a!)[] outs, Tensor x) -> ()")
def _write_all(outs: list[Tensor], x: Tensor) -> None:
    for out in outs:
        out.add_(x)


@op("rows(Tensor x, SymInt n, SymInt[] shape) -> Tensor")
def _rows(x: Tensor, n: int, shape: list[int]) -> Tensor:
    return x.new_full(shape, 0.5) * n + x.sum()


@op(
    "options(Tensor x, Tensor? bias=None, *, str mode='add', float scale=1.0, int[] dims=[0], bool flip=False, "
    "ScalarType? dtype=None, Device? device=None, Tensor?[] extras) -> Tensor"
)
def _options(
    x: Tensor, bias: Tensor | None = None, *, mode: str = "add", scale: float = 1.0, dims: list[int] | None = None,
    flip: bool = False, dtype: torch.dtype | None = None, device: torch.device | None = None,
    extras: list[Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    out = x * min(scale, 3.0) if mode == 'mul\'s "best"\\' else x + min(scale, 3.0)
    for extra in extras or []:
        out = out if extra is None else out + extra
    out = out.flip(dims or [0]) if flip else out
    out = out if bias is None else out + bias
    return out.to(dtype) if dtype is not None else out.clone()


@op("made(Tensor x, *, Device? device=None) -> Tensor", fake=lambda x, *, device=None: torch.empty_like(x))
def _made(x: Tensor, *, device: torch.device | None = None) -> Tensor:
    """A new tensor, on the device that it is told."""
    return torch.full(x.shape, 2.0, device=device)


_LIBRARY.impl("made", _made, "CUDA")


noted: list[int] = []
"""Rows of what `zoo::note` was called with."""


@op("note(Tensor x) -> ()", fake=lambda x: None)
def _note(x: Tensor) -> None:
    """An effect that no tensor shows."""
    noted.append(x.shape[0])


@op("act(Tensor x) -> Tensor")
def _act(x: Tensor) -> Tensor:
    """Functional, called from inside a piece."""
    return x.sigmoid() * 2


@op("turned(Tensor x) -> Tensor")
def _turned(x: Tensor) -> Tensor:
    """A result that is not contiguous, and whose fake says so."""
    return x.t().contiguous().t() * 2
