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
    "argmax", "argmin", "argsort", "bucketize", "ceil", "eq", "floor", "ge", "gt", "le", "lt", "ne", "round",
    "searchsorted", "sign", "sort", "to", "_to_copy", "topk", "trunc",
)  # fmt: skip
"""Ops after which a rounding error in a float may become another value altogether (`to`: into float8 or an integer)."""
OUTLIERS = 0.02
"""Share of rows that may differ in a piece with such ops."""

POINT_BYTES = 2 << 30
"""What the four largest tensors of a piece may take together in a check; larger sizes are replaced by smaller ones. A
check holds some three times as much: inputs twice, results twice, and one result in double precision."""


def tolerance(text: str) -> float:
    """For a piece, by its text."""
    names = {str(dtype).removeprefix("torch."): short for short, dtype in DTYPES.items()}
    found = [
        value for name, value in TOLERANCES.items() if f"torch.{name}" in text or f"{names.get(name, '?')}[" in text
    ]
    return max(found, default=0.0)


_LINE = re.compile(r"^ +(\w+) = torch\.ops\.aten\.(\w+)\.\w+\((.*)\)(?:  # (\w+)\[)?", re.MULTILINE)
_STEPS = re.compile(r"f8|i\d|u8|b8")


def jumps(text: str) -> bool:
    """Whether rows may differ altogether: an op of `JUMPS` reads a float."""
    floats = set(re.findall(r'(\w+): "(?:b?f\d+)\[', text))
    for name, op, arguments, kind in _LINE.findall(text):
        reads = floats & set(re.findall(r"\w+", arguments))
        if op in JUMPS and reads and (op not in ("to", "_to_copy") or _STEPS.match(kind)):
            return True
        if re.fullmatch(r"b?f\d+", kind) or (not kind and reads):
            floats.add(name)
    return False


def affordable(text: str, point: Mapping[str, int], lowest: Mapping[str, int]) -> dict[str, int] | None:
    """`point`, its sizes halved, down to `lowest`, until the largest tensors of the piece fit `POINT_BYTES`.

    Returns:
        None where even the lowest sizes take several times that.
    """
    layouts = re.findall(r"\b(\w+\[[^\]]*\])(?: strides|\"|$)", text, re.MULTILINE)
    sizes = [parse_layout(layout)[:2] for layout in layouts if layout.split("[")[0] in DTYPES]
    point = dict(point)
    while (total := sum(sorted(_bytes(dtype, shape, point) for dtype, shape in sizes)[-4:])) > POINT_BYTES:
        largest = max(point, key=lambda name: point[name] / max(lowest[name], 1), default=None)
        if largest is None or point[largest] <= lowest[largest]:
            return point if total <= 4 * POINT_BYTES else None
        point[largest] = max(point[largest] // 2, lowest[largest])
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
        if bad > (OUTLIERS * errors.numel() if spare else 0):
            raise ProofError(
                f"{what}: relative error {float(errors.max()):.3g} in {bad} of {errors.numel()} rows, "
                f"accepted is {limit:.3g}"
            )
        worst = max(worst, float(errors.max()))
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
    if want.ndim < 2:  # every number is a row of its own
        a, b = a.reshape(-1, 1), b.reshape(-1, 1)
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    equal = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(equal, torch.zeros_like(a), a - b)
    broken = (~equal & ~(a.isfinite() & b.isfinite())).any(-1)
    norms = torch.where(b.isfinite(), b, torch.zeros_like(b)).norm(dim=-1)
    scale = torch.maximum(norms, norms.mean()).clamp_min(1e-30)
    errors = difference.norm(dim=-1) / scale
    return torch.where(broken, torch.full_like(errors, torch.inf), errors)
