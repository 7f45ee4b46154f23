"""What the fusions that end in FP8 have in common: the patterns of the three ways to quantise, and their checks.

    static     y / scale, or y * scale, with the scale read from a tensor of one element
    per token  scale = max(|y|) / 448 of a row, at least `floor`
    per block  the same of each 128 neighbours, y being seen as [..., blocks, 128]

each clamped to +-limit and cast. Whether the floor stands before or after the division, and divisor, floor and limit
themselves, is up to the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from fxc._torch_build import SCALED_MM, TO_COPY
from fxc.graph_text import ABBREVIATIONS
from fxc.passes.base import NearMiss, New
from fxc.passes.graph import ancestors, arguments, dtype, is_op, last_stride, shape, width
from fxc.passes.match import Anything, Call, Constant, Exactly, Found, Named, OneOf, Pattern, Tensor
from fxc.passes.norms import KINDS, cast, product
from fxc.target import Target

aten = torch.ops.aten

KERNELS = ("fxc.ops.fp8", "fxc.ops.fp8_kernels", "fxc.ops.fp8_plan", "fxc.ops.fp8_triton")
"""Modules of the ops that the fusions put in."""

BLOCK = 128
"""Neighbours that share a scale."""
WIDEST = 16384
"""Elements in a row that the kernels take."""
LARGEST = 448.0
"""Of float8_e4m3fn."""
CONTRACTIONS = (
    SCALED_MM, aten.addmm.default, aten.bmm.default, aten.embedding.default, aten.linear.default,
    aten.matmul.default, aten.mm.default,
)  # fmt: skip
_SPLITS = (aten.unflatten.int, aten.view.default, aten.reshape.default)


def supported(target: Target) -> bool:
    """Whether the device converts to FP8: on CUDA, Ada and Hopper do and what came later."""
    return target.device != "cuda" or (target.compute_capability or (0, 0)) >= (8, 9)


def quantised(value: Pattern) -> Pattern:
    """`value` in FP8. Names `scale` and maybe `inverse` where the scale is given, else `scales`, and `limit`."""
    y = cast(value)
    dynamic = Named(cast(_scales(y)), "scales")
    given = Named(Tensor("scale"), "static", True)
    ratio = OneOf(
        (
            Call(aten.div.Tensor, (y, dynamic)),
            product(y, Call(aten.reciprocal.default, (dynamic,))),
            Call(aten.div.Tensor, (y, given)),
            Named(product(y, given), "inverse", True),
        )
    )
    limited = Call(aten.clamp.default, (ratio, Constant("low"), Constant("limit")))
    return Call(aten.to.dtype, (limited, Exactly(torch.float8_e4m3fn)))


def _scales(y: Pattern) -> Pattern:
    top = cast(Call(aten.amax.default, (Call(aten.abs.default, (y,)), Exactly([-1]), Exactly(True))))
    floored = _at_least(top, "floor_before")

    def shrunk(pattern: Pattern) -> Pattern:
        return OneOf((Call(aten.div.Tensor, (pattern, Constant("divisor"))), product(pattern, Constant("factor"))))

    return OneOf((_at_least(shrunk(top), "floor"), shrunk(floored), shrunk(top)))


def _at_least(pattern: Pattern, name: str) -> Pattern:
    return OneOf(
        (
            Call(aten.clamp.default, (pattern, Constant(name))),
            Call(aten.clamp_min.default, (pattern, Constant(name))),
        )
    )


def casts(graph: fx.Graph, heads: Iterable[Any]) -> Iterator[fx.Node]:
    """The anchors: casts to FP8 of what is computed with one of the ops `heads`."""
    heads = tuple(heads)
    for node in fp8_casts(graph):
        if any(is_op(found, *heads) for found in ancestors(node, CONTRACTIONS)):
            yield node


def fp8_casts(graph: fx.Graph) -> Iterator[fx.Node]:
    """All casts to FP8."""
    for node in graph.nodes:
        if is_op(node, aten.to.dtype, TO_COPY) and arguments(node)["dtype"] in _FP8:
            yield node


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check(found: Found, rows: Iterable[str]) -> NearMiss | None:
    """What patterns cannot say of a quantisation.

    Args:
        rows: names of the tensors that the kernel reads by rows.
    """
    values = found.values
    limit, low = values["limit"], values["low"]
    if not 0 < limit <= LARGEST or low != -limit:
        return NearMiss(found.inner[1].name, f"clamps to {low}..{limit}, expected -{LARGEST:g}..{LARGEST:g} or less")
    named = [(name, values[name]) for name in rows if values.get(name) is not None]
    first = named[0][1]
    for _, node in named:
        if dtype(node) not in KINDS or dtype(node) != dtype(first):
            return NearMiss(node.name, f"is {_short(node)}, the kernel takes f32, bf16 and f16, one for all")
        if width(node) is None or shape(node) != shape(first):
            return NearMiss(node.name, f"is {node.meta['layout']}, {first.name} is {first.meta['layout']}")
        if last_stride(node) != "1":
            return NearMiss(node.name, f"has stride {last_stride(node)} in its last dimension, the kernel needs 1")
    if (width(first) or 0) > WIDEST:
        return NearMiss(first.name, f"is {width(first)} wide, the kernel takes {WIDEST}")
    allowed = (torch.float32, dtype(first), torch.float8_e4m3fn)
    for node in found.inner:
        if node.meta.get("layout") and dtype(node) not in allowed:
            return NearMiss(node.name, f"is {_short(node)} on the way, expected f32 or {_short(first)}")
    return _check_scale(found, first)


def _short(node: fx.Node) -> str:
    return ABBREVIATIONS.get(dtype(node), str(dtype(node)))


def _check_scale(found: Found, row: fx.Node) -> NearMiss | None:
    values = found.values
    if "static" in values:
        scale = values["scale"]
        if dtype(scale) != torch.float32 or any(size != "1" for size in shape(scale)):
            return NearMiss(scale.name, f"is {scale.meta['layout']}, expected one f32 as scale")
    elif dtype(values["scales"]) != torch.float32:
        return NearMiss(values["scales"].name, f"is {_short(values['scales'])}, the kernel writes scales in f32")
    root, block = values["root"], _block(found, row)
    if block is None:
        return NearMiss(root.name, f"is {root.meta['layout']}, {row.name} is {row.meta['layout']}")
    if block not in (0, BLOCK):
        return NearMiss(root.name, f"has a scale for each {block}, the kernel for each {BLOCK} or each row")
    return None


def _block(found: Found, row: fx.Node) -> int | None:
    """0 where what is quantised has the shape of `row`; the last size where a row is seen as blocks; else None."""
    have, rows = shape(found.values["root"]), shape(row)
    if have == rows:
        return 0
    if have[:-2] == rows[:-1] and len(have) == len(rows) + 1 and have[-1].isdigit() and "scales" in found.values:
        return int(have[-1])
    return None


def blocked(value: Pattern) -> Pattern:
    """`value`, maybe seen as blocks of its last dimension."""
    return OneOf(
        (
            value,
            Call(aten.unflatten.int, (value, Exactly(-1), Anything())),
            *(Call(op, (value, Anything())) for op in _SPLITS[1:]),
        )
    )


def options(found: Found, row: fx.Node) -> dict[str, Any]:
    """The keyword arguments for the ops of `fxc.ops.fp8`."""
    values = found.values
    limit = float(values["limit"])
    if "static" in values:
        return {"inverse": bool(values.get("inverse")), "limit": limit}
    divisor = float(values["divisor"]) if "divisor" in values else 1.0 / float(values["factor"])
    floor = float(values.get("floor", 0.0)) or float(values.get("floor_before", 0.0)) / divisor
    return {"group": _block(found, row), "limit": limit, "divisor": divisor, "floor": floor}


def results(new: New, found: Found, row: fx.Node, quantised: fx.Node, scales: fx.Node) -> dict[str, fx.Node]:
    """The two results of an op, in the shapes that the graph has."""
    made = {"root": quantised}
    if "scales" in found.values:
        made["scales"] = scales
        if group := _block(found, row):
            blocks = int(shape(row)[-1]) // group
            made["root"] = new.call(aten.unflatten.int, quantised, -1, [blocks, group])
            made["scales"] = new.call(aten.unsqueeze.default, scales, -1)
    return made
