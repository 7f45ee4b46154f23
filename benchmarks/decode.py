"""Decoding with a paged cache and CUDA graphs: the shape of Llama-3.1-8B, bfloat16, random weights, context 1024.

python benchmarks/decode.py [--layers 32] [--sizes 1,8,64,256] [--name h200-decode]

Times are of one call of the program with all its inputs on the device, the copy into static buffers included. The
roofline is what has to be read (weights, keys and values) over the bandwidth of a copy, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine

import fxc
from fxc.ready import make_weight
from fxc.runtime import PagedCache, Sequence

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "torch_dtype": "bfloat16",
}  # fmt: skip
CONTEXT = 1024
CHUNK = 512
"""Tokens of a prompt in one call."""
LADDER = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
"""The 51 sizes that vLLM captures by default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sizes", default="1,8,64,256")
    parser.add_argument("--name", default="h200-decode")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    found: dict[str, Any] = {"machine": machine("cuda"), "layers": options.layers, "context": CONTEXT}
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.layers, sizes, found)
    lines = table(found)
    print("\n".join(lines))
    results = Path(os.environ.get("BENCH_RESULTS", Path(__file__).parent / "results"))
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{options.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (results / f"{options.name}.md").write_text("\n".join([*lines, ""]))


@torch.no_grad()
def measure(folder: Path, layers: int, sizes: list[int], found: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    spec = {
        "model": {"huggingface": ".", "dtype": "bfloat16"}, "device": "cuda",
        "kv_cache": {"block_size": 16, "max_tokens": 2048},
        "dims": {"num_tokens": {"min": 1, "max": 512}, "num_requests": {"min": 1, "max": 512}},
        "compile": {"sizes": sizes},
    }  # fmt: skip
    (folder / "model.yaml").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "fxc", "build", str(folder / "model.yaml"), "--json", "--cache-dir", str(folder)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"fxc build: {done.stderr[-4000:]}")
    found["build"] = json.loads(done.stdout) | {"process": time.perf_counter() - start}
    found["build"].pop("proof")
    start = time.perf_counter()
    program = fxc.load(found["build"]["hash"], cache_dir=folder)
    found["load"] = time.perf_counter() - start
    generator = torch.Generator("cuda").manual_seed(0)
    weights = {weight.name: make_weight(weight, generator) for weight in program.manifest.weights}
    program.bind(weights)
    most = max(sizes)
    cache = PagedCache(program, most * (CONTEXT // 16 + 1))
    for tensor in cache.tensors.values():
        tensor.normal_(generator=generator)
    sequences = [Sequence() for _ in range(most)]
    for sequence in sequences:
        for _ in range(0, CONTEXT, CHUNK):
            cache.batch([(sequence, [0] * CHUNK)])
    read = sum(w.nbytes for name, w in weights.items() if "embed_tokens" not in name)
    keys = cache.bytes // cache.num_blocks // 16 * CONTEXT
    found |= {"weights": read, "cache": cache.bytes, "bandwidth": bandwidth(), "steps": {}}
    batches = {}
    for size in sizes:
        batches[size] = cache.batch([(sequence, [1]) for sequence in sequences[:size]])
        plain = program(**batches[size]).clone()
        entry = {"plain": timed(lambda size=size: program(**batches[size]), 10)}  # type: ignore[misc]
        found["steps"][size] = entry | {"roofline": (read + size * keys) / found["bandwidth"]}
        batches[size]["expected"] = plain
    start = time.perf_counter()
    captured = program.capture()
    torch.cuda.synchronize()
    found["capture"] = {"seconds": time.perf_counter() - start, "sizes": [dump(entry) for entry in captured]}
    for size in sizes:
        expected = batches[size].pop("expected")
        result = program(**batches[size])
        entry = found["steps"][size]
        entry["error"] = ((result - expected).float().norm() / expected.float().norm()).item()
        entry["replay"] = timed(lambda size=size: program(**batches[size]), 20)  # type: ignore[misc]
    program.capture("none")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    start = time.perf_counter()
    captured = program.capture(sizes=[{"num_tokens": n, "num_requests": n} for n in LADDER])
    torch.cuda.synchronize()
    found["ladder"] = {
        "sizes": len(captured), "seconds": time.perf_counter() - start,
        "bytes": torch.cuda.memory_reserved() - before,
    }  # fmt: skip


def dump(entry: Any) -> dict[str, Any]:
    return {"size": entry.size, "bytes": entry.bytes, "seconds": entry.seconds}


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, the GPU waited for after five of them."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 5)
    return statistics.median(times[1:])


def bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 4 GiB."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), 5)


def table(found: dict[str, Any]) -> list[str]:
    where = found["machine"]
    lines = [
        f"# Decode, {found['layers']} layers of Llama-3.1-8B's shape, bfloat16, context {CONTEXT}: {where['device']}, "
        f"torch {where['torch']}, {where['date']}",
        "",
        f"Build {found['build']['process']:.0f} s (trace {found['build']['seconds']['trace']:.0f} s, "
        f"{found['build']['binaries']['compiled']} binaries); load {found['load'] * 1e3:.0f} ms; "
        f"copy bandwidth {found['bandwidth'] / 1e12:.2f} TB/s.",
        "",
        "| tokens | compiled | full replay | roofline | replay / roofline | replay against compiled, error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for size, step in found["steps"].items():
        lines.append(
            f"| {size} | {step['plain'] * 1e3:.2f} ms | {step['replay'] * 1e3:.2f} ms | "
            f"{step['roofline'] * 1e3:.2f} ms | {step['replay'] / step['roofline']:.2f} | {step['error']:.1e} |"
        )
    capture, ladder = found["capture"], found["ladder"]
    lines += [
        "",
        f"Captured {len(capture['sizes'])} sizes in {capture['seconds']:.2f} s; {ladder['sizes']} sizes in "
        f"{ladder['seconds']:.2f} s with {ladder['bytes'] / 2**30:.2f} GiB.",
    ]
    return lines


if __name__ == "__main__":
    main()
