"""What a worker process does with a piece: compile it, or run its binary against eager."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxc import _torch_build, _torch_run
from fxc._worker import CheckJob, CompileJob
from fxc.graph_text import parse_graph, parse_layout
from fxc.prove import affordable, compare
from fxc.random_inputs import draw
from fxc.scalars import compute


def import_ops(names: tuple[str, ...]) -> None:
    """Import what registers custom ops."""
    import fxc.ops  # noqa: F401

    for name in names:
        if name.endswith(".py"):
            from fxc.models.files import load_file

            load_file(Path(name))
        else:
            importlib.import_module(name)


def compile_piece(job: CompileJob) -> dict[str, Any]:
    """Compile, strip, and say where the files are."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(job.directory) / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(Path(job.scratch) / "triton")
    import_ops(job.imports)
    graph, layouts = parse_graph(job.text)
    symbols = _torch_build.Symbols(job.dims)
    inputs = tuple(_fake(symbols, text, job.device) for text in layouts)
    library = _torch_build.compile_graph(
        fx.GraphModule({}, graph), inputs, job.options, scratch=Path(job.scratch), fast=job.fast
    )
    done = subprocess.run(["strip", "--strip-unneeded", str(library)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"error: strip failed: {done.stderr.strip()}")
    calls = library.with_suffix(".json")
    return {
        "library": str(library),
        "calls": str(calls) if calls.exists() else "",
        "assumptions": symbols.assumptions(),
    }


def _fake(symbols: _torch_build.Symbols, text: str, device: str) -> torch.Tensor:
    dtype, sizes, strides = parse_layout(text)
    shape = [compute(size, symbols.values) for size in sizes]
    stride = None if strides is None else [compute(stride, symbols.values) for stride in strides]
    return symbols.tensor(shape, stride, dtype, device)


def check_piece(job: CheckJob) -> dict[str, Any]:
    """Load the binary and compare it with eager at every point.

    Returns:
        {"proof": [{"shape", "max_rel_err", "tolerance"}]}

    Raises:
        ProofError: names the result, the point and the error.
    """
    import_ops(job.imports)
    run = _torch_run.runner(Path(job.library), torch.device(job.device))
    graph, layouts = parse_graph(job.text)
    eager = fx.GraphModule({}, graph)
    proof = []
    for wanted in job.points:
        point = affordable(job.text, wanted, job.lowest)
        if point is None:
            continue
        label = ",".join(f"{name}={value}" for name, value in point.items()) or "static"
        inputs = [
            _draw(layout, point, values, job.device, seed)
            for seed, (layout, values) in enumerate(zip(layouts, job.values, strict=True))
        ]
        copies = [_copy(tensor, job.device) for tensor in inputs]
        with torch.no_grad():
            results = eager(*copies)
            found = run([*inputs])
        if not any(_is_random(node) for node in graph.nodes):
            errors = compare([*found, *inputs], [*results, *copies], len(results), job.text, label)
            proof.append({"shape": label, **errors})
    return {"proof": proof}


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _draw(
    layout: str, point: Mapping[str, int], values: tuple[float, float] | None, device: str, seed: int
) -> torch.Tensor:
    """A random tensor of this layout; matrices scaled so that products stay near 1."""
    dtype, sizes, strides = parse_layout(layout)
    shape = [int(compute(size, point)) for size in sizes]
    stride = None if strides is None else [int(compute(step, point)) for step in strides]
    extent = shape if stride is None else [_extent(shape, stride)]
    tensor = draw(extent, dtype, values, torch.Generator().manual_seed(seed))
    if stride is not None:
        tensor = tensor.as_strided(shape, stride)
    static = all(size.isdigit() for size in sizes)
    if static and dtype.is_floating_point and tensor.ndim >= 2 and values is None:
        memory = _memory(tensor)
        memory.copy_(memory.float() * shape[-1] ** -0.5)
    return _copy(tensor, device)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory lie between the first and the last, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All that a tensor lies on, as one row: elements that several places show (stride 0) once."""
    return tensor.as_strided([_extent(tensor.shape, tensor.stride())], [1])


def _copy(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides; places that share memory still do."""
    return _memory(tensor).to(device, copy=True).as_strided(tensor.shape, tensor.stride())
