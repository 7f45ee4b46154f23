"""Steps of artifacts that were built on a machine without a GPU against those of one that is built here.

python benchmarks/carried.py NAME=FILE.tar ... [--model examples/tiny_llama.yaml] [--name h200-carried] [--dry-run]

NAME says how it was built, `rules` or `tuned`; the files are of `fxc export`, all of the same model and sizes:

    fxc build examples/tiny_llama.yaml --target h200 --set device=cuda --set model.dtype=bfloat16 \\
        --set 'model.args={"layers": 16, "hidden": 2048, ...}'
    fxc export HASH rules.tar

Each is imported, warmed with an empty PATH, which no compiler is on, and every binary of it is compared with eager by
`verify --run`; then its steps run as CUDA graphs, in turns with those of the native build, on the same weights.
`--dry-run` takes no files: it carries a build of level 0 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import results_files
import torch
from machine import machine

import fxc
from fxc.cache import Cache, Trust
from fxc.ready import make_input, make_weight
from fxc.spec import Spec
from fxc.timing import measure

HERE = Path(__file__).parent
NATIVE = "native"
REPEATS = 50


def take_in(file: Path, cache: Path, device: str) -> dict[str, Any]:
    """Import a file, warm and verify it: its hash, what a warm start took, how many processes it started."""
    hash = Cache.open(cache).import_file(file, Trust()).manifest.hash
    warm = fxc_json("warm", hash, "--cache-dir", str(cache), environ={"PATH": ""})
    verified = fxc_json("verify", hash, "--run", "--cache-dir", str(cache)) if device == "cuda" else {}
    return {"hash": hash, "warm": warm["seconds"], "compilations": warm["compilations"], "verified": verified}


def fxc_json(*words: str, environ: Mapping[str, str] = {}) -> dict[str, Any]:
    command = [sys.executable, "-m", "fxc", *words, "--json", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def overrides(spec: Spec) -> list[str]:
    """What makes model.yaml that of a carried artifact."""
    found = [f"device={spec.device}", f"compile.sizes={json.dumps(spec.compile.sizes)}"]
    found += [f"model.args={json.dumps(spec.model.args)}", f"compile.level={spec.compile.level}"]
    return found + ([f"model.dtype={spec.model.dtype}"] if spec.model.dtype else [])


def times(programs: Mapping[str, Any], device: str) -> dict[str, dict[str, Any]]:
    """Per number of tokens and build, a step; each result is compared with the native one before."""
    generator = torch.Generator(device).manual_seed(0)
    manifest = programs[NATIVE].manifest
    weights = {weight.name: make_weight(weight, generator) for weight in manifest.weights}
    for program in programs.values():
        program.bind(weights)
    found = {}
    sizes = [size for size in programs[NATIVE].sizes if isinstance(size, int)]
    for tokens in sizes or [7]:  # level 0 has none
        inputs = {entry.name: make_input(entry, {"num_tokens": tokens}, generator) for entry in manifest.inputs}
        if device == "cuda":
            for program in programs.values():
                program.capture("full", [tokens], copy=True)
        right = programs[NATIVE](**inputs).float()
        for name, program in programs.items():
            error = ((program(**inputs).float() - right).norm() / right.norm()).item()
            if not error < 0.02:
                raise SystemExit(f"{name} at {tokens} tokens differs from the native build by {error:.3g}")
        calls: dict[str, Callable[[], object]] = {name: partial(p, **inputs) for name, p in programs.items()}
        wait = torch.cuda.synchronize if device == "cuda" else None
        found[str(tokens)] = msgspec.to_builtins(measure(calls, REPEATS if device == "cuda" else 2, wait))
        print(tokens, {name: f"{entry['step_us']:.0f} µs" for name, entry in found[str(tokens)].items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="NAME=FILE.tar")
    parser.add_argument("--model", type=Path, default=HERE.parent / "examples/tiny_llama.yaml")
    parser.add_argument("--name", default="h200-carried")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.dry_run else "cuda"
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        files = dict(entry.split("=", 1) for entry in options.files)
        if options.dry_run:
            built = fxc.build(options.model, level=0, cache_dir=folder / "made", prove=False)
            Cache.open(folder / "made").export(Cache.open(folder / "made").artifact(built.hash), folder / "made.tar")
            files = {"rules": str(folder / "made.tar")}
        taken = {kind: take_in(Path(file), folder / kind, device) for kind, file in files.items()}
        programs = {kind: fxc.load(entry["hash"], cache_dir=folder / kind) for kind, entry in taken.items()}
        spec = next(iter(programs.values())).manifest.spec
        native = fxc.build(options.model, overrides=overrides(spec), cache_dir=folder / NATIVE)
        programs = {NATIVE: fxc.load(native.hash, cache_dir=folder / NATIVE), **programs}
        keys = {kind: {factor.name: factor.value for factor in p.manifest.factors} for kind, p in programs.items()}
        found = {
            "machine": machine(device),
            "carried": taken,
            "native": native.seconds,
            "differing": {
                kind: [name for name, value in keys[NATIVE].items() if key.get(name) != value]
                for kind, key in keys.items()
            },
            "sizes": times(programs, device),
        }
    if not options.dry_run:
        save(options.name, found, list(programs))


def save(name: str, found: dict[str, Any], kinds: list[str]) -> None:
    where = found["machine"]
    lines = [
        f"# Artifacts that were built without a GPU: {where['device']}, torch {where['torch']}, {where['date']}",
        "", "Milliseconds of a step, whole-step CUDA graphs; and as a multiple of the native build's.", "",
        f"| tokens | {' | '.join(kinds)} | {' | '.join(f'{kind} / {NATIVE}' for kind in kinds[1:])} |",
        f"| --- |{' --- |' * (2 * len(kinds) - 1)}",
    ]  # fmt: skip
    for tokens, steps in found["sizes"].items():
        us = [steps[kind]["step_us"] for kind in kinds]
        cells = [*(f"{value / 1e3:.3f}" for value in us), *(f"{value / us[0]:.3f}" for value in us[1:])]
        lines.append(f"| {tokens} | {' | '.join(cells)} |")
    results_files.save(name, found, lines)
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
