"""A whole step of Llama-3.1-8B's shape in FP8, with what precedes each linear layer fused, left to Inductor, or apart.

python benchmarks/fp8_step.py [--layers 32] [--tokens 1,8,64,256,2048] [--name h200-fp8-step] [--alone]
                              [--cache-dir DIR] [--dry-run]

    fused     our passes
    inductor  the same model without them: plain torch ops, which Inductor fuses as it sees fit
    apart     norm, activation and quantisation each a kernel of its own, as custom ops
    bound     quantisation taken out: no fusion of it can be faster
    PASS      with --alone: one of our passes

All are built by fxc, static per-tensor scales, one causal sequence of the tokens, and run as CUDA graphs of the whole
step, in turns. With `--cache-dir`, what an earlier run built there is taken. `--dry-run` builds and runs a tiny one on
the CPU without graphs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fp8_models  # noqa: F401  # registers the ops of `apart`, also where all is built already
import msgspec
import results_files
import torch
from machine import machine

import fxc
from fxc.ready import make_weight
from fxc.timing import measure

HERE = Path(__file__).parent
SHAPE = {"hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocab": 128256}
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocab": 96}
OFF = {name: {"enabled": False} for name in ("norm_quant", "gated_quant", "norm_rope", "row_linear", "rope_write")}
ALONE = ("norm_quant", "gated_quant", "norm_rope", "row_linear")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("FP8Llama", {}), "inductor": ("FP8Llama", OFF), "apart": ("apart", OFF), "bound": ("bound", {}),
}  # fmt: skip
REPEATS = 20


def build(folder: Path, cache: Path, name: str, layers: int, tokens: list[int], device: str) -> str:
    """The path of the artifact."""
    target, passes = VARIANTS[name]
    shape = SHAPE if device == "cuda" else TINY
    most = max(tokens)
    spec = {
        "model": {"target": f"{HERE / 'fp8_models.py'}:{target}", "args": {"layers": layers, **shape}},
        "device": device,
        "inputs": {
            "input_ids": {"shape": ["num_tokens"], "dtype": "int64", "values": [0, shape["vocab"]]},
            "positions": {"shape": ["num_tokens"], "dtype": "int64", "values": [0, 8192]},
        },
        "dims": {"num_tokens": {"min": 1, "max": most}},
        "compile": {"sizes": tokens if device == "cuda" else []},
        "passes": passes,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(spec))
    return fxc.build(folder / f"{name}.yaml", cache_dir=cache, prove=False).path


def programs(paths: dict[str, str], device: str) -> dict[str, Any]:
    """All of them on the same weights."""
    weights: dict[str, torch.Tensor] = {}
    generator = torch.Generator(device).manual_seed(0)
    loaded = {}
    for name, path in paths.items():
        program = fxc.load(path, device=device)
        for weight in program.manifest.weights:
            if weight.name not in weights:
                weights[weight.name] = make_weight(weight, generator)
        loaded[name] = program.bind({w.name: weights[w.name] for w in program.manifest.weights})
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", default="1,8,64,256,2048")
    parser.add_argument("--name", default="h200-fp8-step")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.alone:
        VARIANTS.update({name: ("FP8Llama", {**OFF, name: {"enabled": True}}) for name in ALONE})
    device = "cpu" if options.dry_run else "cuda"
    tokens = [1, 5] if options.dry_run else [int(text) for text in options.tokens.split(",")]
    layers = 2 if options.dry_run else options.layers
    found: dict[str, Any] = {"layers": layers, "machine": machine(device), "sizes": {}}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        cache = options.cache_dir or Path(folder) / "cache"
        paths = {name: build(Path(folder), cache, name, layers, tokens, device) for name in VARIANTS}
        loaded = programs(paths, device)
        for count in tokens:
            torch.compiler.reset()  # the ops of `apart` are compiled for every shape, and a function for eight of them
            ids = torch.randint(0, 96, (count,), device=device)
            inputs = {"input_ids": ids, "positions": torch.arange(count, device=device)}
            if device == "cuda":
                for program in loaded.values():
                    program.capture("full", [count])
            calls: dict[str, Callable[[], object]] = {
                name: partial(program, **inputs) for name, program in loaded.items()
            }
            wait = torch.cuda.synchronize if device == "cuda" else None
            times = measure(calls, 2 if options.dry_run else REPEATS, wait)
            found["sizes"][str(count)] = {name: msgspec.to_builtins(times[name]) for name in calls}
            print(count, {name: f"{times[name].step_us:.0f} µs" for name in calls}, flush=True)
            if not options.dry_run:
                save(options.name, found)


def save(name: str, found: dict[str, Any]) -> None:
    where = found["machine"]
    lines = [
        f"# A step in FP8, {found['layers']} layers of Llama-3.1-8B's shape: {where['device']}, "
        f"torch {where['torch']}, {where['date']}",
        "", "Milliseconds, whole-step CUDA graphs.", "",
        "| tokens | fused | inductor | apart | bound | fused / inductor | fused / bound |",
        f"|{' --- |' * 7}",
    ]  # fmt: skip
    steps = {count: {name: time["step_us"] for name, time in times.items()} for count, times in found["sizes"].items()}
    for count, us in steps.items():
        shown = " | ".join(f"{us[name] / 1e3:.3f}" for name in ("fused", "inductor", "apart", "bound"))
        lines.append(f"| {count} | {shown} | {us['fused'] / us['inductor']:.3f} | {us['fused'] / us['bound']:.3f} |")
    if ALONE[0] in VARIANTS:
        lines += ["", "Microseconds that each pass alone takes off the step of Inductor.", ""]
        lines += [f"| tokens | {' | '.join(ALONE)} | all | bound |", f"|{' --- |' * (len(ALONE) + 3)}"]
        for count, us in steps.items():
            gains = [us["inductor"] - us[name] for name in (*ALONE, "fused", "bound")]
            lines.append(f"| {count} | {' | '.join(f'{gain:.0f}' for gain in gains)} |")
    results_files.save(name, found, lines)


if __name__ == "__main__":
    main()
