"""Attention over a paged cache and the FP8 quantisation of its result by one scale, on both sides of a cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import fx

from fxc.ops import paged_attention
from fxc.ops.paged import LARGEST
from fxc.passes import quantise
from fxc.passes.base import Fusion, NearMiss, New
from fxc.passes.graph import ancestors, arguments, dtype, is_op, shape
from fxc.passes.match import Found, Made, Pattern, Through
from fxc.passes.norms import KINDS
from fxc.passes.quantise import CONTRACTIONS, quantised
from fxc.shapes import Range
from fxc.target import Target

aten = torch.ops.aten

MOVES = (
    aten.alias.default, aten.contiguous.default, aten.flatten.using_ints, aten.permute.default, aten.reshape.default,
    aten.select.int, aten.squeeze.dim, aten.transpose.int, aten.unflatten.int, aten.unsqueeze.default,
    aten.view.default,
)  # fmt: skip
"""Ops that move elements and compute nothing: before and after the quantisation they do the same."""


@dataclass(frozen=True)
class AttentionQuant(Fusion):
    """`fxc::attention.paged` that writes FP8, by a scale that is given."""

    name: ClassVar[str] = "attention_quant"
    scope: ClassVar[Literal["piece", "graph"]] = "graph"
    kernels: ClassVar[tuple[str, ...]] = (
        "fxc.ops.paged", "fxc.ops.paged_kernels", "fxc.ops.paged_plan", "fxc.ops.paged_triton",
    )  # fmt: skip
    at: ClassVar[str] = "attention"
    pattern: ClassVar[Pattern] = quantised(Through(MOVES, Made(paged_attention, "attention"), "moves"))

    def runs_on(self, target: Target) -> bool:
        return quantise.supported(target)

    def anchors(self, graph: fx.Graph, box: Range) -> Iterable[fx.Node]:
        """Casts to FP8 of what attention gives."""
        for node in quantise.fp8_casts(graph):
            found = (node, *ancestors(node, CONTRACTIONS))
            if any(is_op(arg, paged_attention) for other in found for arg in other.all_input_nodes):
                yield node

    def check(self, found: Found) -> NearMiss | None:
        values = found.values
        attention, limit, low = values["attention"], values["limit"], values["low"]
        if "static" not in values:
            return NearMiss(values["scales"].name, "is a scale for each row, the kernel takes one for all")
        if limit != LARGEST or low != -LARGEST:
            return NearMiss(found.inner[1].name, f"clamps to {low}..{limit}, expected {-LARGEST:g}..{LARGEST:g}")
        if dtype(attention) not in KINDS:
            return NearMiss(attention.name, f"is {attention.meta['layout']}, or FP8 already")
        scale = values["scale"]
        if dtype(scale) != torch.float32 or any(size != "1" for size in shape(scale)):
            return NearMiss(scale.name, f"is {scale.meta['layout']}, expected one f32 as scale")
        for node in found.inner[:-1]:
            if dtype(node) not in (torch.float32, dtype(attention), torch.float8_e4m3fn):
                return NearMiss(node.name, f"is {node.meta['layout']} on the way, expected f32")
        return None

    def replace(self, new: New, found: Found) -> Mapping[str, fx.Node]:
        values = found.values
        given = arguments(values["attention"]) | {"output_scale": values["scale"]}
        options = {name: given[name] for name in OPTIONS if given[name] is not None}
        if "inverse" in values:
            options["output_inverse"] = True
        made = new.call(paged_attention, *(given[name] for name in TENSORS), **options)
        for move in reversed(values.get("moves", ())):
            made = new.call(move.target, made, *move.args[1:], **move.kwargs)
        return {"root": made}


TENSORS = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_starts", "sinks", "output_scale")
OPTIONS = ("scale", "window", "chunk", "softcap")
