"""What it takes for a binary to equal eager: points, tolerances, comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
"""Share of rows that may differ in a result that lies behind such an op; never by NaN or an infinity."""

POINT_BYTES = 2 << 30
"""What the four largest tensors of a piece may take together in a check; larger sizes are replaced by smaller ones. A
check holds several times as much: inputs twice, results twice, and what it takes to make numbers up. Where several
checks run at once, or memory is short, it is less."""
AT_ONCE = 1 << 22
"""Numbers that are compared at a time, in double precision."""


def tolerance(text: str) -> float:
    """For a piece, by its text."""
    names = {str(dtype).removeprefix("torch."): short for short, dtype in DTYPES.items()}
    found = [
        value for name, value in TOLERANCES.items() if f"torch.{name}" in text or f"{names.get(name, '?')}[" in text
    ]
    return max(found, default=0.0)


_LINE = re.compile(r"^ +(?:(\w+) = )?(?:torch\.ops\.\w+\.(\w+)\.\w+)?(.+?)(?:  # (\w+)\[.*)?$", re.MULTILINE)
_PARAMETER = re.compile(r'(\w+): "(\w+)\[')
_FLOAT = re.compile(r"b?f\d+")
_STEPS = re.compile(r"f8|i\d|u8|b8")


class Jumps(NamedTuple):
    """Which results and inputs of a piece lie behind an op of `JUMPS` that reads a float."""

    results: frozenset[int]
    inputs: frozenset[int]


def jumps(text: str) -> Jumps:
    """What in a piece may differ altogether after a rounding error, by the piece's text."""
    head, _, body = text.partition("):\n")  # parameters are on one line, or on one each
    parameters = _PARAMETER.findall(head)
    floats = {name for name, kind in parameters if _FLOAT.fullmatch(kind)}
    behind: set[str] = set()
    results: list[str] = []
    for name, op, rest, kind in _LINE.findall(body):
        words = re.findall(r"[^\W\d]\w*", rest)
        if rest.startswith("return"):
            results = words[1:]
            continue
        jump = op in JUMPS and floats & set(words) and (op not in ("to", "_to_copy") or _STEPS.match(kind))
        if jump or behind & set(words):
            behind.add(name)
            if op.endswith("_"):  # writes into its first argument
                behind |= set(words[:1])
        if _FLOAT.fullmatch(kind) or (not kind and floats & set(words)):
            floats.add(name)
    return Jumps(
        frozenset(index for index, name in enumerate(results) if name in behind),
        frozenset(index for index, (name, _) in enumerate(parameters) if name in behind),
    )


def affordable(
    text: str, point: Mapping[str, int], lowest: Mapping[str, int], budget: int, most: int
) -> dict[str, int] | None:
    """`point`, its sizes halved, down to `lowest`, until the four largest tensors of the piece fit `budget` bytes.

    Returns:
        None where even at the lowest sizes they take more than `most` bytes.
    """
    layouts = re.findall(r"\b(\w+\[[^\]]*\])(?: strides|\"|$)", text, re.MULTILINE)
    sizes = [parse_layout(layout)[:2] for layout in layouts if layout.split("[")[0] in DTYPES]
    point = dict(point)
    while (total := sum(sorted(_bytes(dtype, shape, point) for dtype, shape in sizes)[-4:])) > budget:
        largest = max(point, key=lambda name: point[name] / max(lowest[name], 1), default=None)
        if largest is None or point[largest] <= lowest[largest]:
            return point if total <= most else None
        point[largest] = max(point[largest] // 2, lowest[largest])
    return point


def _bytes(dtype: torch.dtype, shape: Sequence[str], point: Mapping[str, int]) -> int:
    total = dtype.itemsize
    for size in shape:
        total *= int(compute(size, point))
    return total


def compare(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], results: int, text: str, where: str
) -> dict[str, Any]:
    """The largest relative error of a row, over the results and then the (maybe written) inputs.

    Returns:
        {"max_rel_err", "tolerance", "excused"}

    Raises:
        ProofError: names the tensor, what came and what was expected.
    """
    limit = tolerance(text)
    behind = jumps(text)
    worst = 0.0
    excused = 0
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
        bad = int((errors > accepted(want.dtype, limit)).sum())
        spare = index in behind.results if index < results else index - results in behind.inputs
        if bad > (OUTLIERS * errors.numel() if spare else 0) or (bad and bool(errors.isinf().any())):
            raise ProofError(
                f"{what}: relative error {float(errors.max()):.3g} in {bad} of {errors.numel()} rows, "
                f"accepted is {limit:.3g}"
            )
        worst = max(worst, float(errors.max()))
        excused += bad
    return {"max_rel_err": worst, "tolerance": limit, "excused": excused}


def largest_error(have: torch.Tensor, want: torch.Tensor) -> float:
    """The largest of `row_errors`; 0 for empty tensors."""
    errors = row_errors(have, want)
    return float(errors.max()) if errors.numel() else 0.0


def accepted(dtype: torch.dtype, limit: float) -> float:
    """What error a tensor of this dtype may have: integers must be equal."""
    return limit if dtype.is_floating_point or dtype.is_complex else 0.0


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
    width = want.shape[-1] if want.ndim > 1 else 1  # else every number is a row of its own
    a, b = have.reshape(-1, width), want.reshape(-1, width)
    if _equal(have, want):  # most inputs, which may be as large as memory allows
        return torch.zeros(len(b), dtype=torch.float64, device=b.device)
    many = max(1, AT_ONCE // width)
    parts = [_differences(*rows) for rows in zip(a.split(many), b.split(many), strict=True)]
    difference, norms, broken = (torch.cat(part) for part in zip(*parts, strict=True))
    scale = torch.maximum(norms, norms.mean()).clamp_min(1e-30)
    return torch.where(broken, torch.full_like(norms, torch.inf), difference / scale)


def _equal(have: torch.Tensor, want: torch.Tensor) -> bool:
    if have.dtype != want.dtype:
        return False
    if want.dtype.itemsize == 1:  # float8 has no comparison everywhere
        have, want = have.view(torch.uint8), want.view(torch.uint8)
    return torch.equal(have, want)


def _differences(have: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row: the norm of the difference, the norm of what is wanted, whether only one side is finite."""
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = have.to(wide), want.to(wide)
    equal = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(equal, torch.zeros_like(a), a - b)
    broken = (~equal & ~(a.isfinite() & b.isfinite())).any(-1)
    norms = torch.where(b.isfinite(), b, torch.zeros_like(b)).norm(dim=-1)
    return difference.norm(dim=-1), norms, broken
