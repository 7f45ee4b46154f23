"""What passes add to a build: examples/fp8_llama.yaml with all and with none, in turns, each from an empty cache.

python benchmarks/passes_build.py [--target h200] [--turns 3] [--name passes-build] [--dry-run]

A whole build, process included. `--target` wants a torch that is built for CUDA. `--dry-run` builds once, at level 0.
"""

from __future__ import annotations

import argparse
import json
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


def seconds(*words: str) -> float:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "fxc", "build", str(MODEL), "--no-prove", "-q", "--cache-dir", cache, *words]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        return time.perf_counter() - start


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
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(1 if options.dry_run else options.turns):
        times["with"].append(seconds(*common))
        times["without"].append(seconds(*common, *without))
        print(f"{times['with'][-1]:.1f} s with passes, {times['without'][-1]:.1f} s without", flush=True)
    if options.dry_run:
        return
    where = machine("cpu")
    middle = {name: statistics.median(found) for name, found in times.items()}
    ratio = middle["with"] / middle["without"]
    table = [
        f"# Builds with and without passes: fp8_llama, sizes 1, 8, 64 and the general program, for "
        f"{options.target or 'cpu'}; {where['cores']} cores, torch {where['torch']}, {where['date']}",
        "", f"{middle['with']:.1f} s with all passes, {middle['without']:.1f} s with none: {ratio:.2f} times; medians "
        f"of {options.turns}.",
    ]  # fmt: skip
    results_files.save(options.name, {"machine": where, "target": options.target, "seconds": times}, table)
    print(table[-1])


if __name__ == "__main__":
    main()
