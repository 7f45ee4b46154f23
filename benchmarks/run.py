"""Runs the measurements, each in a new process, and writes benchmarks/results/NAME.json and NAME.md.

python benchmarks/run.py [build] [load] [call] [others] [--device cuda] [--layers 4,16,32] [--name NAME]
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import results_files
from machine import machine

HERE = Path(__file__).parent
SIZES = [1, 8, 64]
WIDTHS: dict[str, dict[str, int]] = {
    "cpu": {"hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 512, "vocab": 1024},
    "cuda": {"hidden": 2048, "heads": 32, "kv_heads": 8, "intermediate": 8192, "vocab": 32000},
}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
LAYERS = {"cpu": [4, 16, 32], "cuda": [16]}


class Bench:
    """One run of the script: where it writes, and what it found so far."""

    def __init__(self, device: str, name: str, layers: Sequence[int], repeats: int, limit: float) -> None:
        self.device, self.name, self.layers, self.repeats = device, name, layers, repeats
        self.deadline = time.monotonic() + limit
        self.scratch = Path(tempfile.mkdtemp(prefix="fxc-bench-"))
        atexit.register(shutil.rmtree, self.scratch, ignore_errors=True)
        self.found: dict[str, Any] = {"machine": machine(device), "sizes": SIZES, "dtype": DTYPES[device]}
        self.found["widths"] = WIDTHS[device]
        self.table: list[str] = []
        """Lines of the Markdown result."""

    def config(self, layers: int, **more: Any) -> dict[str, Any]:
        args = {"layers": layers, **WIDTHS[self.device]}
        return {"device": self.device, "dtype": DTYPES[self.device], "sizes": SIZES, "args": args, **more}

    def measure(self, mode: str, config: Mapping[str, Any], compiler_cache: str = "none") -> dict[str, Any]:
        """Run one mode of measured.py in a new process; `compiler_cache` names Inductor's cache directory."""
        environ = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(self.scratch / "inductor" / compiler_cache))
        return self.child([sys.executable, str(HERE / "measured.py"), mode, json.dumps(config)], environ)

    def build(self, cache: str, spec: Path, overrides: Iterable[str]) -> dict[str, Any]:
        """`fxc build` in a new process."""
        command = [sys.executable, "-m", "fxc", "build", str(spec), "--json", "--cache-dir", str(self.scratch / cache)]
        environ = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(self.scratch / "inductor" / f"fxc-{cache}"))
        start = time.perf_counter()
        result = self.child([*command, *(word for item in overrides for word in ("--set", item))], environ)
        return result | {"process": time.perf_counter() - start}

    def build_decoder(self, cache: str, layers: int) -> dict[str, Any]:
        args = self.config(layers)["args"]
        overrides = [f"model.args={json.dumps(args)}", f"model.dtype={DTYPES[self.device]}", f"device={self.device}"]
        overrides += [f"compile.sizes={SIZES}", f"inputs.input_ids.values=[0, {args['vocab']}]"]
        return self.build(cache, HERE.parent / "examples/tiny_llama.yaml", overrides)

    def child(self, command: list[str], environ: dict[str, str]) -> dict[str, Any]:
        left = self.deadline - time.monotonic()
        if left < 10:
            raise TimeoutError(f"no time left for {' '.join(command[1:4])}")
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=left)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def repeat(self, mode: str, config: Mapping[str, Any], times: int, compiler_cache: str = "none") -> dict[str, Any]:
        """The run with the median `ready`; all of them under `all`."""
        runs = sorted((self.measure(mode, config, compiler_cache) for _ in range(times)), key=lambda run: run["ready"])
        return runs[len(runs) // 2] | {"all": [run["ready"] for run in runs]}

    def row(self, *cells: str) -> None:
        self.say("| " + " | ".join(cells) + " |")

    def head(self, title: str, *cells: str) -> None:
        self.say(f"\n{title}\n")
        self.row(*cells)
        self.row(*("---" for _ in cells))

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.table.append(line)

    def keep(self, part: str, value: Any) -> None:
        """Save after each part: a run that is stopped keeps what it has."""
        self.found[part] = value
        where = self.found["machine"]
        title = f"{where['device']}, {where['cores']} cores, torch {where['torch']}, {where['date']}"
        results_files.save(self.name, self.found, [f"# {title}", *self.table])


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


def times(one: float, other: float) -> str:
    return f"{one / other:.1f}x"


def bench_call(bench: Bench) -> None:
    """(a) One call of a small program."""
    built = bench.build("small", HERE / "small.yaml", [f"device={bench.device}"])
    config = {"device": bench.device, "hash": built["hash"], "cache": str(bench.scratch / "small")}
    found = {}
    for how in ("eager", "torch.compile", "fxc"):
        runs = [bench.measure("small", config | {"how": how}, "small")["call"] for _ in range(bench.repeats)]
        found[how] = {"call": statistics.median(runs), "all": runs}
    bench.head(
        "One call of a small program, relu(x * scale + shift) of 8 x 16",
        "",
        "time of a call",
        "in calls of eager",
    )
    for how, result in found.items():
        bench.row(how, seconds(result["call"]), times(result["call"], found["eager"]["call"]))
    bench.keep("call", found)


def bench_load(bench: Bench) -> None:
    """(b) From weights on the device to every size run once, in a new process."""
    layers = depth(bench)
    name = f"cold-{layers}"  # built by `build` already, if that ran
    hash_ = bench.build_decoder(name, layers)["hash"]
    ours = bench.repeat("loaded", bench.config(layers, hash=hash_, cache=str(bench.scratch / name)), bench.repeats)
    theirs = warm(bench, layers, {})
    title = (
        f"Ready to serve, {layers} layers: weights on the device to {', '.join(map(str, SIZES))} and 37 tokens run once"
    )
    bench.head(title, "", "ready", "against fxc.load", "largest error to eager")
    for how, result in (("fxc.load", ours), ("torch.compile, warm caches", theirs)):
        ratio = times(result["ready"], ours["ready"])
        bench.row(how, seconds(result["ready"]), ratio, f"{max(result['error'].values()):.1e}")
        for phase, words in (("import", "importing fxc.runtime"), ("load", "loading"), ("bind", "binding weights")):
            if phase in result:
                bench.row(f"of it, {words}", seconds(result[phase]), "", "")
    bench.head("One step of the decoder", "tokens", "fxc", "torch.compile")
    for count, step in ours["step"].items():
        bench.row(count, seconds(step), seconds(theirs["step"][count]))
    bench.keep("load", {"fxc.load": ours, "torch.compile": theirs})


def bench_others(bench: Bench) -> None:
    """(b) The same for two things that do less: no program per size, and no general program."""
    layers = depth(bench)
    folder = bench.scratch / "artifacts"
    folder.mkdir()
    found = {"torch.compile, warm caches, one dynamic program": warm(bench, layers, {"general": True})}
    bench.measure("saved", bench.config(layers, cache=str(folder)), "artifacts")
    artifacts = bench.repeat("artifacts", bench.config(layers, cache=str(folder)), bench.repeats, "artifacts")
    found["CompiledArtifact.load, warm caches, sizes only"] = artifacts
    bench.head(f"The same with fewer programs, {layers} layers", "", "ready")
    for how, result in found.items():
        bench.row(how, seconds(result["ready"]))
    bench.keep("others", found)


def depth(bench: Bench) -> int:
    return 16 if 16 in bench.layers else bench.layers[0]


def warm(bench: Bench, layers: int, more: dict[str, Any]) -> dict[str, Any]:
    """torch.compile in a new process with Inductor's caches filled by an earlier one."""
    config, cache = bench.config(layers, **more), f"{layers}{'-general' if more else ''}"
    if not (bench.scratch / "inductor" / cache).exists():
        bench.measure("compiled", config, cache)
    return bench.repeat("compiled", config, bench.repeats, cache)


def bench_build(bench: Bench) -> None:
    """(c) Build from nothing, by phase, against torch.compile with empty caches. Wall time of whole processes."""
    phases = ("trace", "partition", "compile", "prove", "publish")
    bench.head(
        f"Build with empty caches: sizes {', '.join(map(str, SIZES))} and the general program, whole process",
        "layers", "fxc build", *phases, "binaries", "torch.compile cold", "fxc / torch.compile",
    )  # fmt: skip
    found: dict[str, Any] = {}
    for layers in bench.layers:
        ours = bench.build_decoder(f"cold-{layers}", layers)
        theirs = bench.measure("compiled", bench.config(layers), str(layers))
        found[str(layers)] = {"fxc build": ours, "torch.compile": theirs}
        spent = (seconds(ours["seconds"][phase]) for phase in phases)
        # The model's weights and the comparison with eager are no part of compiling.
        cold = theirs["import_torch"] + theirs["ready"]
        count = str(ours["binaries"]["compiled"])
        bench.row(str(layers), seconds(ours["process"]), *spent, count, seconds(cold), f"{ours['process'] / cold:.2f}")
        bench.keep("build", found)


PARTS = {"build": bench_build, "load": bench_load, "call": bench_call, "others": bench_others}
"""In this order: `load` uses the compiler caches that `build` filled, and what matters most comes first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="build, load, call, others; all when none is named")
    parser.add_argument("--device", choices=sorted(WIDTHS), default="cpu")
    parser.add_argument("--layers", help="comma-separated numbers of layers")
    parser.add_argument("--name", help="name of the result files; the device when absent")
    parser.add_argument("--repeats", type=int, default=3, help="processes per measurement")
    parser.add_argument("--limit", type=float, default=7200, help="seconds after which no process is started")
    options = parser.parse_args()
    layers = [int(n) for n in options.layers.split(",")] if options.layers else LAYERS[options.device]
    bench = Bench(options.device, options.name or options.device, layers, options.repeats, options.limit)
    for name, part in PARTS.items():
        if not options.parts or name in options.parts:
            try:
                part(bench)
            except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
                sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
