"""Times `fxc::attention.paged` on a GPU against PyTorch's own attention, and writes results/NAME.json and NAME.md.

python benchmarks/attention.py [--name h200-attention] [--limit SECONDS] [--skip flex] [--tiles]

Heads are those of Llama-3.1-8B (32 of queries, 8 of keys and values, 128 wide) in bfloat16, blocks hold 16 keys and lie
in no order. A number is the time of one call inside a CUDA graph of many that go round caches of more than 256 MB, so
that no call finds its keys in the L2. Peers get what suits them: keys and values dense, contiguous, without a block
table. SDPA is the fastest of its backends; FlexAttention is compiled for the shape. A mixed batch is
two calls for them. `--tiles` times prefill with other tiles instead, and writes results/NAME-tiles.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import results_files
import torch
from device_clock import clock
from machine import machine
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from fxc.ops import kv_write, paged_attention, paged_triton
from fxc.ops.paged_plan import decide
from fxc.timing import copy_bandwidth

HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16
DTYPE = torch.bfloat16
ROTATION = 256 << 20
"""Bytes that the caches of one graph have at least; the L2 of an H200 holds 60 MB."""


@dataclass(frozen=True)
class Case:
    name: str
    parts: tuple[tuple[int, int, int], ...]
    """Requests, new tokens of each, and keys of each with them."""

    @property
    def decode(self) -> bool:
        return all(new == 1 for _, new, _ in self.parts)

    @property
    def bytes(self) -> int:
        """Keys and values read once, queries read and results written."""
        keys = sum(count * length for count, _, length in self.parts)
        tokens = sum(count * new for count, new, _ in self.parts)
        return (keys * KV_HEADS + tokens * HEADS) * 2 * WIDTH * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Two products, counting the keys that a query sees."""
        seen = sum(count * (new * (length - new) + new * (new + 1) // 2) for count, new, length in self.parts)
        return 4 * seen * HEADS * WIDTH


CASES = [
    *(Case(f"decode {n} x {k}", ((n, 1, k),)) for n in (1, 8, 64, 256) for k in (1024, 8192)),
    Case("prefill 1 x 2048", ((1, 2048, 2048),)),
    Case("prefill 4 x 1024", ((4, 1024, 1024),)),
    Case("prefill 1 x 512 after 7680", ((1, 512, 8192),)),
    Case("mixed 64 x 1 + 1 x 1984", ((64, 1, 1024), (1, 1984, 1984))),
]


@dataclass(frozen=True)
class Paged:
    """One set of arguments of `paged_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    starts: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.q, self.k, self.v, self.table, self.lengths, self.starts))


def paged(case: Case) -> Paged:
    new = [new for count, new, _ in case.parts for _ in range(count)]
    lengths = [length for count, _, length in case.parts for _ in range(count)]
    width = max(-(-length // BLOCK) for length in lengths)
    blocks = sum(-(-length // BLOCK) for length in lengths)
    k, v = (torch.randn(blocks, BLOCK, KV_HEADS, WIDTH, dtype=DTYPE, device="cuda") for _ in range(2))
    order = torch.randperm(blocks, device="cuda").int()
    table = torch.zeros(len(lengths), width, dtype=torch.int32, device="cuda")
    at = 0
    for request, length in enumerate(lengths):
        count = -(-length // BLOCK)
        table[request, :count] = order[at : at + count]
        at += count
    q = torch.randn(sum(new), HEADS, WIDTH, dtype=DTYPE, device="cuda")
    starts = torch.tensor([0, *new]).cumsum(0).int().cuda()
    return Paged(q, k, v, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), starts)


def dense(case: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v [requests, heads, tokens, width] for each part."""

    def make(*lead: int) -> Tensor:
        return torch.randn(*lead, WIDTH, dtype=DTYPE, device="cuda")

    return [
        (make(count, HEADS, new), make(count, KV_HEADS, length), make(count, KV_HEADS, length))
        for count, new, length in case.parts
    ]


def sets(case: Case) -> int:
    return max(1, -(-ROTATION // case.bytes))


def ours(case: Case) -> float:
    return clock([functools.partial(paged_attention, *paged(case)) for _ in range(sets(case))])


BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)  # the others take no groups of heads


def sdpa(case: Case) -> dict[str, float]:
    inputs = [dense(case) for _ in range(sets(case))]

    def call(backend: SDPBackend, parts: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        with sdpa_kernel(backend):
            for q, k, v in parts:
                new, length = q.shape[2], k.shape[2]
                late = causal_lower_right(new, length) if 1 < new < length else None
                causal = 1 < new == length
                scaled_dot_product_attention(q, k, v, attn_mask=late, is_causal=causal, enable_gqa=True)

    found = {}
    for backend in BACKENDS:
        try:
            found[backend.name] = clock([functools.partial(call, backend, parts) for parts in inputs])
        except RuntimeError:  # this backend does not take the shape
            torch.cuda.synchronize()
    return found


def flex(case: Case) -> float:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # else it stops compiling after some shapes
    compiled = torch.compile(flex_attention, dynamic=False)
    masks = {}
    for _, new, length in case.parts:
        if new > 1:
            late = length - new

            def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, late: int = late) -> Tensor:
                return i + late >= j

            masks[new, length] = create_block_mask(seen, None, None, new, length)

    def call(parts: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        for q, k, v in parts:
            compiled(q, k, v, block_mask=masks.get((q.shape[2], k.shape[2])), enable_gqa=True)

    inputs = [dense(case) for _ in range(sets(case))]
    try:
        call(inputs[0])
    except RuntimeError as error:
        print(f"FlexAttention: {error}", file=sys.stderr)
        return float("inf")
    return clock([functools.partial(call, parts) for parts in inputs])


TILES = (
    (128, 64, 8, 2, 128), (128, 64, 8, 3, 128), (128, 64, 8, 2, None), (128, 64, 8, 3, None), (128, 64, 4, 2, None),
    (128, 64, 4, 3, 255), (64, 64, 4, 2, None), (64, 64, 4, 2, 128), (64, 64, 4, 3, None), (64, 64, 4, 2, 168),
    (64, 128, 4, 2, None), (64, 32, 4, 3, 128), (128, 32, 8, 3, 128), (128, 32, 8, 4, 128), (128, 128, 8, 2, None),
    (128, 128, 8, 2, 168), (128, 64, 8, 2, 160), (256, 64, 8, 2, None), (256, 64, 16, 2, 128), (128, 128, 8, 3, None),
    (256, 64, 8, 3, None), (128, 64, 8, 4, None), (128, 64, 8, 1, 128),
)  # fmt: skip
"""Rows, keys, warps, stages and the most registers of a thread."""


def tiles(name: str, title: str) -> None:
    """Microseconds of the wide tiles alone, of the launches for short requests, and of all of it."""
    cases = [case for case in CASES if case.name.startswith("prefill")]
    inputs = {case.name: [paged(case) for _ in range(max(2, sets(case)))] for case in cases}
    times: dict[str, list[float]] = {}
    for case in cases:
        new = [new for count, new, _ in case.parts for _ in range(count)]
        chosen = decide(
            sum(new), len(new), heads=HEADS, kv_heads=KV_HEADS, d=WIDTH, dv=WIDTH, max_keys=case.parts[0][2]
        )
        plans = {"as chosen": chosen, "its launches for short requests": chosen[1:]}
        for rows, keys, warps, stages, registers in TILES:
            label = f"{rows} rows, {keys} keys, {warps} warps, {stages} stages, registers {registers or 'any'}"
            wide = replace(chosen[0], rows=rows, keys=keys, warps=warps, stages=stages, registers=registers)
            plans[label] = (wide,)
        for label, plan in plans.items():
            calls = [functools.partial(paged_triton.attend, *one, plan=plan) for one in inputs[case.name]]
            times.setdefault(label, []).append(clock(calls) * 1e6 if plan else 0.0)
    lines = [f"# Tiles of prefill, µs: {title}", "", f"| | {' | '.join(case.name for case in cases)} |"]
    lines += [f"|{' --- |' * (len(cases) + 1)}"]
    lines += [f"| {label} | {' | '.join(f'{us:.1f}' for us in row)} |" for label, row in times.items()]
    results_files.save(f"{name}-tiles", {"cases": [case.name for case in cases], "us": times}, lines)
    print("\n".join(lines))


def writing() -> dict[str, float]:
    found = {}
    for tokens in (1, 256, 2048):
        k, v = (torch.randn(tokens, KV_HEADS, WIDTH, dtype=DTYPE, device="cuda") for _ in range(2))
        caches = [torch.zeros(1 << 14, BLOCK, KV_HEADS, WIDTH, dtype=DTYPE, device="cuda") for _ in range(2)]
        slots = torch.randperm(BLOCK << 14, device="cuda")[:tokens]
        found[str(tokens)] = clock([functools.partial(kv_write, k, v, *caches, slots)])
    return found


def rate(case: Case, seconds: float) -> str:
    if case.decode:
        return f"{case.bytes / seconds * 1e-9:.0f} GB/s"
    return f"{case.flops / seconds * 1e-12:.0f} TFLOPS"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="h200-attention")
    parser.add_argument("--limit", type=float, default=500)
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit
    bandwidth = copy_bandwidth(torch.device("cuda"))
    where = machine("cuda")
    title = f"{where['device']}, {where['cores']} cores, torch {where['torch']}, {where['date']}"
    if args.tiles:
        tiles(args.name, title)
        return
    found: dict[str, Any] = {"machine": where, "copy": bandwidth, "cases": {}, "kv_write": writing()}
    lines = [f"# {title}", "", f"Copy: {bandwidth * 1e-9:.0f} GB/s. kv_write of " + ", ".join(
        f"{tokens} tokens: {seconds * 1e6:.1f} µs" for tokens, seconds in found["kv_write"].items()
    ), ""]  # fmt: skip
    lines += ["| | fxc | | floor | SDPA | | FlexAttention | fxc / best peer |", "|---|---|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for case in CASES:
        if time.monotonic() > deadline:
            break
        mine, theirs = ours(case), sdpa(case) if "sdpa" not in args.skip else {}
        other = flex(case) if "flex" not in args.skip else float("inf")
        name, fastest = min(theirs.items(), key=lambda item: item[1], default=("", float("inf")))
        floor = case.bytes / bandwidth
        row = [case.name, f"{mine * 1e6:.1f} µs", rate(case, mine), f"{floor * 1e6:.1f} µs", f"{fastest * 1e6:.1f} µs"]
        row += [
            name.split("_")[0].lower(),
            f"{other * 1e6:.1f} µs" if other < 1 else "",
            f"{mine / min(fastest, other):.2f}",
        ]
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
        found["cases"][case.name] = {"fxc": mine, "sdpa": theirs, "flex": other, "floor": floor}
        results_files.save(args.name, found, lines)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of backends that say why they refuse
    with torch.no_grad():
        main()
