"""Kernels of fusions on a GPU: bytes over time against a copy, and against the same graph without the fusion.

python benchmarks/fusions.py [--name h200-fusions] [--limit SECONDS] [--dry-run]

Each fusion is a small function, traced and rewritten as a build does, at 1 to 8192 tokens, hidden 4096 and 8192, in
bfloat16. It is timed as its kernel, as what Inductor makes of the function as it was written, and op by op, each a
kernel of its own. A number is the time of one call inside a CUDA graph of up to 256 that go round tensors of 256 MB in
all, results too, so that from 64 tokens on no call finds its input in the L2, nor writes where one before it has.
`--dry-run` runs everything once on the CPU, small, and times nothing. Results go to results/NAME.json and NAME.md;
"costs" in there are lines for passes/costs.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import results_files
import torch
from device_clock import clock
from machine import machine
from torch import Tensor, fx
from torch.nn.functional import silu

sys.path.insert(0, str(Path(__file__).parent.parent))

from fxc.graph_text import parse_graph
from fxc.ops import kv_write
from fxc.partition import partition
from fxc.passes import PIPELINE, run
from fxc.shapes import Range
from fxc.spec import InputSpec
from fxc.timing import copy_bandwidth
from fxc.trace import capture

FP8 = torch.float8_e4m3fn
TOKENS = (1, 8, 64, 256, 2048, 8192)
WIDTHS = (4096, 8192)
ROTATION = 256 << 20
"""Bytes that the inputs of one graph have at least; the L2 of an H200 holds 60 MB."""
D, KV_HEADS, BLOCK = 128, 8, 16


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def static(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).clamp(-448, 448).to(FP8)


def per_token(y: Tensor) -> tuple[Tensor, Tensor]:
    wide = y.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (wide / scale).clamp(-448, 448).to(FP8), scale


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def norm_static(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return static(normed(total, weight), scale), total


def norm_token(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    return *per_token(normed(total, weight)), total


def gated_static(x: Tensor, scale: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return static(silu(gate) * up, scale)


def gated_token(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    return per_token(silu(gate) * up)


def qk_rope(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = qkv.split([qkv.shape[1] - KV_HEADS, KV_HEADS], 1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return turned(normed(q, q_weight), cos, sin), turned(normed(k, k_weight), cos, sin)


def rope_write(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    q, k, v = qkv.split([qkv.shape[1] - 2 * KV_HEADS, KV_HEADS, KV_HEADS], 1)
    q, k = (turned(part, cos.unsqueeze(1), sin.unsqueeze(1)) for part in (q, k))
    kv_write(k, v, k_cache, v_cache, slots)
    return q


@dataclass(frozen=True)
class Case:
    name: str
    fusion: str
    """Name of the pass."""
    form: str
    """As in passes/costs.py."""
    function: Callable[..., Any]
    shapes: dict[str, str]
    moved: Callable[[int], int]
    """Bytes that are read and written once, of so many tokens; weights left out."""


def cases(width: int) -> list[Case]:
    row, weight, scale = f"bfloat16[n, {width}]", f"bfloat16[{width}]", "float32[]"
    heads = width // D
    added = {"x": row, "residual": row, "weight": weight}
    tables = {"cos": f"float32[n, {D // 2}]", "sin": f"float32[n, {D // 2}]"}
    both = {
        "qkv": f"bfloat16[n, {heads + KV_HEADS}, {D}]", "q_weight": f"bfloat16[{D}]", "k_weight": f"bfloat16[{D}]",
        **tables,
    }  # fmt: skip
    cache = f"bfloat16[1024, {BLOCK}, {KV_HEADS}, {D}]"
    paged = {
        "qkv": f"bfloat16[n, {heads + 2 * KV_HEADS}, {D}]", **tables, "k_cache": cache, "v_cache": cache,
        "slots": "int64[n]",
    }  # fmt: skip
    return [
        Case("add, norm, FP8", "norm_quant", "static", norm_static, {**added, "scale": scale},
             lambda n: 7 * n * width),
        Case("add, norm, FP8", "norm_quant", "per token", norm_token, added, lambda n: 7 * n * width),
        Case("SiLU, times, FP8", "gated_quant", "static", gated_static,
             {"x": f"bfloat16[n, {2 * width}]", "scale": scale}, lambda n: 5 * n * width),
        Case("SiLU, times, FP8", "gated_quant", "per token", gated_token, {"x": f"bfloat16[n, {2 * width}]"},
             lambda n: 5 * n * width),
        Case("norm of heads, rotary", "norm_rope", "", qk_rope, both, lambda n: 4 * n * (heads + KV_HEADS + 1) * D),
        Case("rotary, cache write", "rope_write", "", rope_write, paged,
             lambda n: 4 * n * (heads + 2 * KV_HEADS + 1) * D + 8 * n),
    ]  # fmt: skip


def piece(case: Case, most: int) -> str:
    """The case as a piece, as a build has it."""
    inputs = {}
    for name, text in case.shapes.items():
        dtype, _, sizes = text.rstrip("]").partition("[")
        shape = tuple(int(size) if size.isdigit() else size for size in sizes.split(", ") if size)
        inputs[name] = InputSpec(shape=shape, dtype=dtype)  # type: ignore[arg-type]
    module = torch.nn.Module()
    module.forward = case.function
    return partition(capture(module, inputs, Range((("n", 1, most),)), "cpu"), ()).calls[0].piece.text


def forms(text: str, most: int, device: str) -> dict[str, Callable[..., Any]]:
    """The piece as its kernel, as Inductor compiles it, and op by op."""
    ran = run(text, Range((("n", 1, most),)), [cls() for cls in PIPELINE if cls.scope == "piece"])
    plain = fx.GraphModule({}, parse_graph(text)[0])
    graph, _ = parse_graph(ran.text)
    if not ran.changed_by:
        raise SystemExit(f"no pass has found anything in\n{text}")
    if device == "cpu":
        return {"fused": fx.GraphModule({}, graph), "ops": plain}
    for node in graph.nodes:
        node.target = launches().get(node.target, node.target)
    scattered, _ = parse_graph(text)
    for node in scattered.nodes:
        node.target = launches(plain=True).get(node.target, node.target)
    apart = torch.compile(fx.GraphModule({}, scattered), dynamic=False)
    return {"fused": fx.GraphModule({}, graph), "inductor": apart, "ops": plain}


def launches(*, plain: bool = False) -> dict[Any, Callable[..., Any]]:
    """What launches the kernels of ops; `plain`: what a compiler can see inside."""
    from fxc.ops import fp8, fp8_triton, rope, rope_triton, rope_write
    from fxc.ops.kv_write import scatter

    if plain:
        return {kv_write: scatter}
    return {
        fp8.norm_fp8: fp8_triton.norm, fp8.gated_fp8: fp8_triton.gated, rope.norm_rope: rope_triton.norm_rope,
        rope_write.norm_rope_write: rope_triton.norm_rope_write,
    }  # fmt: skip


def made(text: str, n: int, device: str, seed: int) -> list[Tensor]:
    """Inputs at `n` tokens, slots all different."""
    from fxc.graph_run import drawn

    _, layouts = parse_graph(text)
    generator = torch.Generator(device).manual_seed(seed)
    tensors = [torch.randperm(1024 * BLOCK, device=device, generator=generator)[:n] if layout.startswith("i64")
               else drawn(layout, {"n": n}, None, device, seed + index)
               for index, layout in enumerate(layouts)]  # fmt: skip
    return [tensor.abs() + 0.01 if tensor.ndim == 0 else tensor for tensor in tensors]


def measure(case: Case, width: int, tokens: int, calls: dict[str, Callable[..., Any]], text: str) -> dict[str, Any]:
    moved = case.moved(tokens)
    sets = max(8, min(256, -(-ROTATION // max(moved, 1))))
    inputs = [made(text, tokens, "cuda", 100 * index) for index in range(sets)]
    with torch.no_grad():
        times = {name: clock([partial(call, *tensors) for tensors in inputs]) * 1e6 for name, call in calls.items()}
        bytes_ = [torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(sets)]
        times["copy"] = clock([tensor.clone for tensor in bytes_]) * 1e6
    return {
        "case": case.name,
        "fusion": case.fusion,
        "form": case.form,
        "width": width,
        "tokens": tokens,
        "bytes": moved,
        "us": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="h200-fusions")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no case is begun")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
        return
    start, lines = time.monotonic(), []
    bandwidth, where = copy_bandwidth(torch.device("cuda")), machine("cuda")
    for width in WIDTHS:
        for case in cases(width):
            text = piece(case, TOKENS[-1])
            calls = forms(text, TOKENS[-1], "cuda")
            for tokens in TOKENS:
                if time.monotonic() - start < options.limit:
                    lines.append(measure(case, width, tokens, calls, text))
                    torch.cuda.empty_cache()
            save(options.name, where, bandwidth, lines)


def save(name: str, where: dict[str, Any], bandwidth: float, lines: list[dict[str, Any]]) -> None:
    capability = torch.cuda.get_device_capability()
    costs = [
        f"Cost({line['fusion']!r}, {line['form']!r}, {capability}, {line['tokens']}, {line['width']}, "
        f"{line['us']['fused']:.2f}, {line['us']['inductor']:.2f}, H200),"
        for line in lines
    ]
    table = [
        f"# Fusions, bfloat16: {where['device']}, torch {where['torch']}, {where['date']}", "",
        f"A copy of 4 GiB: {bandwidth * 1e-9:.0f} GB/s. Microseconds. 'Of 4 GiB' is the fused kernel's bandwidth over "
        "that, 'of as much' the time of a copy that moves as many bytes over the kernel's.", "",
        "| | scales | hidden | tokens | fused | Inductor | ops | copy | of 4 GiB | of as much | fused / Inductor |",
        f"|{' --- |' * 11}",
    ]  # fmt: skip
    for line in lines:
        us = line["us"]
        share = line["bytes"] / us["fused"] * 1e6 / bandwidth
        table.append(
            f"| {line['case']} | {line['form']} | {line['width']} | {line['tokens']} | {us['fused']:.1f} | "
            f"{us['inductor']:.1f} | {us['ops']:.1f} | {us['copy']:.1f} | {share:.0%} | "
            f"{us['copy'] / us['fused']:.0%} | {us['fused'] / us['inductor']:.2f} |"
        )
    found = {"machine": where, "copy": bandwidth, "cases": lines, "costs": costs}
    results_files.save(name, found, table)
    print("\n".join(table[-len(TOKENS) :]), flush=True)


def dry_run() -> None:
    """Every fusion is found, and gives what its function gives."""
    width = 8 * D
    for case in cases(width):
        text = piece(case, 64)
        calls = forms(text, 64, "cpu")
        for n in (1, 5):
            with torch.no_grad():
                results = [call(*made(text, n, "cpu", 0)) for call in calls.values()]
            for have, want in zip(*results, strict=True):
                error = (have.float() - want.float()).norm() / want.float().norm()
                assert error < 0.05, f"{case.name} at {n}: {error}"
        print(f"{case.name} {case.form}: {partial(case.moved, 1)()} bytes a token, equal")


if __name__ == "__main__":
    main()
