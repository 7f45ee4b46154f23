"""Host time of a call: how long until it returns, while the GPU still works.

python benchmarks/host.py [--device cuda] [--layers 16] [--name h200-host]

The same compiled pieces are called by the stitched step and by FX's interpreter; torch.compile runs the same model. The
model is small, so that the GPU is done before the host is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results_files
import torch
from machine import machine
from torch import fx

import fxc
from fxc.runtime import Program

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from tiny_llama import TinyLlama

ARGS = {"hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 512, "vocab": 1024}
TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--name", default="h200-host")
    options = parser.parse_args()
    args = {"layers": options.layers, **ARGS}
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"model.args={json.dumps(args)}", f"model.dtype={dtype}", f"device={options.device}"]
        overrides.append(f"compile.sizes=[{TOKENS}]")
        example = Path(__file__).parent.parent / "examples" / "tiny_llama.yaml"
        result = fxc.build(example, overrides=overrides, cache_dir=folder)
        program = fxc.load(result.hash, cache_dir=Path(folder))
    model = TinyLlama(**args).to(device=options.device, dtype=getattr(torch, dtype)).eval()
    program.bind(model)
    found = {"machine": machine(options.device), "layers": options.layers} | measure(program, model, options.device)
    lines = table(found)
    print("\n".join(lines))
    results_files.save(options.name, found, lines)


@torch.no_grad()
def measure(program: Program, model: torch.nn.Module, device: str) -> dict[str, Any]:
    ids = torch.randint(0, ARGS["vocab"], (TOKENS,), device=device)
    positions = torch.arange(TOKENS, device=device)
    index = program.ranges.index(next(box for box in program.ranges if box.is_size))
    interpreted = fx.Interpreter(as_graph(program, index))
    calls: dict[str, Callable[[], Any]] = {
        "the program, its inputs checked": lambda: program(ids, positions),
        "its step alone": lambda: program._steps[index](ids, positions),
        "the same pieces by fx.Interpreter": lambda: interpreted.run(ids, positions),
        "torch.compile": lambda: compiled(ids, positions),
        "eager": lambda: model(ids, positions),
    }
    compiled = torch.compile(model, dynamic=False)
    expected = model(ids, positions)
    host: dict[str, float] = {}
    for name, call in calls.items():
        torch.testing.assert_close(call(), expected, rtol=0.1, atol=0.1)
        host[name] = host_seconds(call, device)
    for mode in ("piecewise", "full"):
        if program.capture(mode, [TOKENS]):
            host[f"the program, {mode} graphs"] = host_seconds(lambda: program(ids, positions), device)
    pieces = program.manifest.pieces[program.manifest.programs[index].step]
    return {"pieces": len(pieces), "compiled": sum(piece.kind == "compiled" for piece in pieces), "host": host}


def as_graph(program: Program, index: int) -> fx.GraphModule:
    """The step as a graph of calls, for an interpreter."""
    tracer = fx.Tracer()

    def noted(piece: Callable[..., Any]) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            return tracer.create_proxy("call_function", piece, (args,), {})

        return run

    factory = program._factories[index]
    step = factory.make([noted(piece) for piece in factory.pieces], [*(program._weights or ()), *program._constants])
    graph = tracer.trace(step)
    return fx.GraphModule(tracer.root, graph)


def host_seconds(call: Callable[[], Any], device: str) -> float:
    """Median over 30 of the mean of 10 calls; the GPU is waited for between, not while the clock runs."""
    times = []
    for _ in range(33):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            call()
        times.append((time.perf_counter() - start) / 10)
    return statistics.median(times[3:])


def table(found: dict[str, Any]) -> list[str]:
    where, count = found["machine"], found["pieces"]
    lines = [
        f"# Host time of a call, {found['layers']} layers, {count} pieces, {found['compiled']} of them compiled: "
        f"{where['device']}, torch {where['torch']}, {where['date']}",
        "",
        "| who calls | µs per call | µs per piece |",
        "| --- | --- | --- |",
    ]
    for name, seconds in found["host"].items():
        lines.append(f"| {name} | {seconds * 1e6:.0f} | {seconds * 1e6 / count:.1f} |")
    return lines


if __name__ == "__main__":
    main()
