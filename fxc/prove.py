"""What it takes for a binary to equal eager: points, tolerances, comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from fxc.errors import ProofError
from fxc.graph_text import DTYPES, parse_layout
from fxc.scalars import compute

TOLERANCES: dict[str, float] = {
    "float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2,
    "float8_e4m3fn": 0.13, "float8_e5m2": 0.26, "complex64": 1e-4, "complex128": 1e-9,
}  # fmt: skip
"""Largest relative error of a row that is accepted, by the least precise dtype in the piece: a step of bfloat16 is
2**-8, and Inductor leaves out roundings between fused ops. Integers must be equal."""

JUMPS = (
    "argmax", "argmin", "argsort", "bernoulli", "bucketize", "ceil", "eq", "float8", "floor", "ge", "gt", "le", "lt",
    "multinomial", "ne", "round", "searchsorted", "sign", "sort", "topk", "trunc",
)  # fmt: skip
"""Ops after which a rounding error may become another value altogether."""
OUTLIERS = 0.02
"""Share of rows that may differ in a piece with such ops; at least one may."""

POINT_BYTES = 2 << 30
"""Tensors of a check together take about this much at most; larger sizes are replaced by smaller ones."""


def tolerance(text: str) -> float:
    """For a piece, by its text."""
    names = {str(dtype).removeprefix("torch."): short for short, dtype in DTYPES.items()}
    found = [
        value for name, value in TOLERANCES.items() if f"torch.{name}" in text or f"{names.get(name, '?')}[" in text
    ]
    return max(found, default=0.0)


def jumps(text: str) -> bool:
    """Whether the piece has an op after which rows may differ altogether."""
    return any(re.search(rf"\.{op}\b|\b{op}_e", text) for op in JUMPS)


def affordable(text: str, point: Mapping[str, int], limit: int = POINT_BYTES) -> dict[str, int]:
    """`point`, its sizes halved until the largest tensors of the piece fit the limit."""
    layouts = re.findall(r"\b(\w+\[[^\]]*\])(?: strides|\"|$)", text, re.MULTILINE)
    sizes = [parse_layout(layout)[:2] for layout in layouts if layout.split("[")[0] in DTYPES]
    point = dict(point)
    while sum(sorted(_bytes(dtype, shape, point) for dtype, shape in sizes)[-4:]) > limit and max(point.values()) > 2:
        largest = max(point, key=lambda name: point[name])
        point[largest] //= 2
    return point


def _bytes(dtype: torch.dtype, shape: Sequence[str], point: Mapping[str, int]) -> int:
    total = dtype.itemsize
    for size in shape:
        total *= int(compute(size, point))
    return total


def compare(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], results: int, text: str, where: str
) -> dict[str, float]:
    """The largest relative error of a row, over the results and then the (maybe written) inputs.

    Returns:
        {"max_rel_err", "tolerance"}

    Raises:
        ProofError: names the tensor, what came and what was expected.
    """
    limit = tolerance(text)
    spare = jumps(text)
    worst = 0.0
    for index, (have, want) in enumerate(zip(found, expected, strict=True)):
        name = f"result {index}" if index < results else f"input {index - results} afterwards"
        what = f"{name} at {where}"
        if have.shape != want.shape or have.dtype != want.dtype:
            raise ProofError(f"{what} is {have.dtype}{list(have.shape)}, eager gives {want.dtype}{list(want.shape)}")
        if index < results and strides(have) != strides(want):
            raise ProofError(f"{what} has strides {have.stride()}, eager gives {want.stride()}")
        errors = row_errors(have, want)
        if not errors.numel():
            continue
        bad = int((errors > (limit if want.is_floating_point() or want.is_complex() else 0.0)).sum())
        if bad and not (spare and bad <= max(1, int(OUTLIERS * errors.numel()))):
            raise ProofError(
                f"{what}: relative error {float(errors.max()):.3g} in {bad} of {errors.numel()} rows, "
                f"accepted is {limit:.3g}"
            )
        worst = max(worst, float(errors[errors <= limit].max()) if bad != errors.numel() else 0.0)
    return {"max_rel_err": worst, "tolerance": limit}


def strides(tensor: torch.Tensor) -> list[int]:
    """Strides that decide anything: not those of a size of 1, none of an empty tensor."""
    return (
        [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        if tensor.numel()
        else []
    )


def row_errors(have: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Per row (along the last dimension), the norm of the difference over the norm of the row or of a usual one.

    NaN equals NaN and an infinity itself; an inequality of those is an infinite error.
    """
    if not want.numel():
        return torch.empty(0)
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = have.to(wide), want.to(wide)
    if want.ndim == 0:
        a, b = a[None], b[None]
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    equal = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(equal, torch.zeros_like(a), a - b)
    broken = (~equal & ~(a.isfinite() & b.isfinite())).any(-1)
    norms = torch.where(b.isfinite(), b, torch.zeros_like(b)).norm(dim=-1)
    scale = torch.maximum(norms, norms.mean()).clamp_min(1e-30)
    errors = difference.norm(dim=-1) / scale
    return torch.where(broken, torch.full_like(errors, torch.inf), errors)
