"""Decoding with a paged cache and CUDA graphs: the shape of Llama-3.1-8B, bfloat16, random weights, context 1024.

python benchmarks/decode.py [--layers 32] [--sizes 1,8,64,256] [--no-peers] [--name h200-decode] [--cache-dir DIR]

Steps are timed by `fxc bench`, torch.compile's reduce-overhead in turns with the rest. What capturing many sizes takes
is measured in processes of their own, as in a server that starts: the clock begins with the weights on the device. With
`--cache-dir`, what an earlier run built there is taken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import results_files
import torch
from machine import machine

import fxc
from fxc.bench import BenchResult, bench
from fxc.ready import make_weight
from fxc.runtime import PagedCache

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "torch_dtype": "bfloat16",
}  # fmt: skip
CONTEXT = 1024
LADDERS = {
    "51 sizes, whole steps": ("full", [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]),
    "51 sizes, piecewise": ("piecewise", [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]),
    "256 sizes, whole steps": ("full", [*range(1, 257)]),
}
"""The 51 are those that vLLM captures by default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sizes", default="1,8,64,256")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--name", default="h200-decode")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--capture", nargs=2, metavar=("LADDER", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.capture:
        print(json.dumps(capture(*options.capture)))
        return
    sizes = [int(size) for size in options.sizes.split(",")]
    found: dict[str, Any] = {"machine": machine("cuda"), "layers": options.layers, "context": CONTEXT}
    with tempfile.TemporaryDirectory() as folder:
        found["build"] = build(Path(folder), options.cache_dir or Path(folder), options.layers, sizes)
        path = found["build"].pop("path")
        found["captures"] = {name: child(name, path) for name in LADDERS}
        save(options.name, found, None)  # if what follows is cut off
        peers = () if options.no_peers else ("reduce-overhead",)
        result = bench(path, sizes=sizes, peers=peers, context=CONTEXT)
    save(options.name, found, result)


def build(folder: Path, cache: Path, layers: int, sizes: list[int]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    spec = {
        "model": {"huggingface": ".", "dtype": "bfloat16"}, "device": "cuda",
        "kv_cache": {"block_size": 16, "max_tokens": 2048},
        "dims": {"num_tokens": {"min": 1, "max": 512}, "num_requests": {"min": 1, "max": 512}},
        "compile": {"sizes": sizes},
    }  # fmt: skip
    (folder / "model.yaml").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "fxc", "build", str(folder / "model.yaml"), "--json", "--cache-dir", str(cache)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"fxc build: {done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout) | {"process": time.perf_counter() - start}
    return {name: result[name] for name in ("path", "seconds", "binaries", "process", "unique_pieces")}


def child(ladder: str, path: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--capture", ladder, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{ladder}: {done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def capture(ladder: str, path: str) -> dict[str, Any]:
    """Seconds of a new server, from having its weights on the device to having its graphs."""
    mode, sizes = LADDERS[ladder]
    generator = torch.Generator("cuda").manual_seed(0)
    manifest = fxc.load(path).manifest  # also loads what belongs to CUDA itself
    weights = {weight.name: make_weight(weight, generator) for weight in manifest.weights}
    torch.cuda.synchronize()
    start = time.perf_counter()
    program = fxc.load(path)
    loaded = time.perf_counter()
    program.bind(weights)
    PagedCache(program, 256)
    torch.cuda.synchronize()
    bound = time.perf_counter()
    points = [{"num_tokens": n, **({"num_requests": n} if mode == "full" else {})} for n in sizes]
    recorded = program.capture(mode, points)
    torch.cuda.synchronize()
    end = time.perf_counter()
    slow = [entry.seconds for entry in recorded]
    return {
        "sizes": len(recorded), "load": loaded - start, "bind": bound - loaded, "capture": end - bound,
        "all": end - start, "bytes": sum(entry.bytes for entry in recorded), "first": slow[0],
        "median": sorted(slow)[len(slow) // 2], "graphs": [msgspec.to_builtins(entry) for entry in recorded],
    }  # fmt: skip


def save(name: str, found: dict[str, Any], result: BenchResult | None) -> None:
    if result is not None:
        found = found | {"bench": msgspec.to_builtins(result)}
    lines = table(found)
    print("\n".join(lines), flush=True)
    results_files.save(name, found, lines)


def table(found: dict[str, Any]) -> list[str]:
    where = found["machine"]
    lines = [
        f"# Decode, {found['layers']} layers of Llama-3.1-8B's shape, bfloat16, context {CONTEXT}: {where['device']}, "
        f"torch {where['torch']}, {where['date']}",
        "",
    ]
    build = found["build"]
    if compiled := build["binaries"]["compiled"]:
        traced = build["seconds"]["trace"]
        lines += [f"Build {build['process']:.0f} s (trace {traced:.0f} s), {compiled} binaries.", ""]
    if "bench" in found:
        lines += steps(found["bench"])
    lines += [
        "| captured in a new process | load | bind | capture | all | first size | others, median | memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in found["captures"].items():
        lines.append(
            f"| {name} | {entry['load'] * 1e3:.0f} ms | {entry['bind'] * 1e3:.0f} ms | {entry['capture']:.2f} s | "
            f"{entry['all']:.2f} s | {entry['first'] * 1e3:.0f} ms | {entry['median'] * 1e3:.1f} ms | "
            f"{entry['bytes'] / 2**30:.2f} GiB |"
        )
    return lines


def steps(result: dict[str, Any]) -> list[str]:
    variants = result["variants"]
    lines = [
        f"Milliseconds per step; copy bandwidth {result['bandwidth'] / 1e12:.2f} TB/s.",
        "",
        f"| tokens | {' | '.join(variants)} | roofline | full / roofline | full / reduce-overhead | host, compiled |",
        f"| --- |{' --- |' * (len(variants) + 4)}",
    ]
    for size in result["sizes"]:
        times = size["times"]
        shown = [f"{times[name]['step_us'] / 1e3:.2f}" if name in times else "" for name in variants]
        full = times["full"]["step_us"] if "full" in times else float("nan")
        peer = times["reduce-overhead"]["step_us"] if "reduce-overhead" in times else float("nan")
        lines.append(
            f"| {size['tokens']} | {' | '.join(shown)} | {size['roofline_us'] / 1e3:.2f} | "
            f"{full / size['roofline_us']:.2f} | {full / peer:.2f} | {times['compiled']['host_us'] / 1e3:.2f} |"
        )
    missing = {f"{name}: {why}" for size in result["sizes"] for name, why in size["missing"].items()}
    return [*lines, "", *sorted(missing), *([""] if missing else [])]


if __name__ == "__main__":
    main()
