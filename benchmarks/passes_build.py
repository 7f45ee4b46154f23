"""What passes add to a build: examples/fp8_llama.yaml with all and with none, in turns, each from an empty cache.

python benchmarks/passes_build.py [--target h200] [--turns 3] [--name passes-build] [--dry-run]

A whole build, process included. `--target` wants a torch that is built for CUDA. `--dry-run` builds once, at level 0.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import results_files
from machine import machine

from fxc.passes import PIPELINE

MODEL = Path(__file__).parent.parent / "examples/fp8_llama.yaml"
SIZES = [1, 8, 64]


def seconds(*words: str) -> tuple[float, float]:
    """Of the clock, and of all processes on all cores, which other work disturbs less."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "fxc", "build", str(MODEL), "--no-prove", "-q", "--cache-dir", cache, *words]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--name", default="passes-build")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    common = ["-O0"] if options.dry_run else ["--set", f"compile.sizes={json.dumps(SIZES)}"]
    if options.target:
        common += ["--target", options.target, "--set", "device=cuda"]
    without = [word for entry in PIPELINE for word in ("--set", f'passes.{entry.name}={{"enabled": false}}')]
    times: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for _ in range(1 if options.dry_run else options.turns):
        times["with"].append(seconds(*common))
        times["without"].append(seconds(*common, *without))
        print(*(f"{name} passes: {t[-1][0]:.1f} s, {t[-1][1]:.1f} s of CPU." for name, t in times.items()), flush=True)
    if options.dry_run:
        return
    where = machine("cpu")
    wall, cpu = ({name: statistics.median(pair[kind] for pair in t) for name, t in times.items()} for kind in (0, 1))
    table = [
        f"# Builds with and without passes: fp8_llama, sizes 1, 8, 64 and the general program, for "
        f"{options.target or 'cpu'}; {where['cores']} cores, torch {where['torch']}, {where['date']}",
        "", f"{wall['with']:.1f} s with all passes, {wall['without']:.1f} s with none: "
        f"{wall['with'] / wall['without']:.2f} times; {cpu['with']:.1f} and {cpu['without']:.1f} s of CPU: "
        f"{cpu['with'] / cpu['without']:.2f} times; medians of {options.turns}.",
    ]  # fmt: skip
    results_files.save(options.name, {"machine": where, "target": options.target, "seconds": times}, table)
    print(table[-1])


if __name__ == "__main__":
    main()
