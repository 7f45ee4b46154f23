"""What a worker process does with a piece: compile it, or run its binary against eager."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxc import _torch_build, _torch_run, kernel_choice, kernels
from fxc.expand import expand
from fxc.graph_run import copied, drawn, placed
from fxc.graph_text import parse_graph, parse_layout
from fxc.jobs import CheckJob, CompileJob, TimeJob, TuneJob, UserOps
from fxc.ops import backends, kv_write, paged, paged_attention, paged_attention_out
from fxc.ops.kv_write import scatter
from fxc.prove import POINT_BYTES, affordable, compare
from fxc.scalars import compute
from fxc.shapes import point_label
from fxc.target import Target
from fxc.timing import measure


def import_ops(ops: UserOps) -> None:
    """Import what registers custom ops; for good, in a process that does nothing else."""
    import fxc.ops
    import fxc.ops.fp8
    import fxc.ops.gemv
    import fxc.ops.rope
    import fxc.ops.rope_write  # noqa: F401

    if ops.imports:
        sys.path.append(ops.directory)
    for name in ops.imports:
        if name.endswith(".py"):
            from fxc.models.files import load_file

            load_file(Path(name))
        else:
            importlib.import_module(name)


def compile_piece(job: CompileJob) -> dict[str, Any]:
    """Compile, strip, and say where the files are."""
    library, symbols = _compile(job)
    done = subprocess.run(["strip", "--strip-unneeded", str(library)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"error: strip failed: {done.stderr.strip()}")
    made = list(_torch_build.compiled_kernels()) if job.target.device == "cuda" else []
    calls = library.with_suffix(".json")
    return {
        "library": str(library),
        "calls": str(calls) if calls.exists() else "",
        "assumptions": symbols.assumptions(),
        "kernels": kernels.describe([kernels.Compiled(**kernel) for kernel in made], job.target),
    }


def tune_piece(job: TuneJob) -> dict[str, Any]:
    """Compile, and say which of its candidates is the fastest of each kernel.

    Returns:
        {"kernels": [{"hash", "name", "configuration", "us", "rules", "rules_us"}]}
    """
    heuristics = _torch_build.heuristics()
    kernel_choice.time_kernels(heuristics)
    _compile(job)
    return {"kernels": kernel_choice.timed_kernels(heuristics)}


def _compile(job: CompileJob) -> tuple[Path, _torch_build.Symbols]:
    """The library, and what its sizes are called."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(job.directory) / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(Path(job.scratch) / "triton")
    if job.record is not None:
        from fxc import cuda_sdk, virtual

        virtual.activate(job.record, cuda_sdk.make(Path(job.scratch)))
    _require_device(job.target)
    import_ops(job.ops)
    graph, layouts = parse_graph(job.text)
    symbols = _torch_build.Symbols(job.dims)
    inputs = tuple(_fake(symbols, text, job.target.device) for text in layouts)
    module = expand(fx.GraphModule({}, graph), inputs, symbols, _kernels(job.target))
    library = _torch_build.compile_graph(
        module, inputs, job.options, job.target, scratch=Path(job.scratch), fast=job.fast
    )
    return library, symbols


def _kernels(target: Target) -> dict[Any, Callable[..., Any]]:
    """Ops that a binary for this target has the kernels of, and what launches those; on the CPU what the compiler makes
    of their references."""
    from fxc.ops import fp8, gemv, rope, rope_write

    if target.device != "cuda":
        return {
            fp8.norm_fp8: fp8.norm_reference,
            fp8.gated_fp8: fp8.gated_reference,
            gemv.gemv: torch.nn.functional.linear,
            kv_write: scatter,
            rope.norm_rope: rope.reference,
            rope_write.norm_rope_write: rope_write.reference,
        }
    from fxc.ops import fp8_triton, gemv_triton, paged_triton, rope_triton

    chosen = backends.choose(target).values()
    return {
        **{op: launch for backend in chosen for op, launch in backend.kernels(target).items()},
        fp8.norm_fp8: partial(fp8_triton.norm, call=paged_triton.trace),
        fp8.gated_fp8: partial(fp8_triton.gated, call=paged_triton.trace),
        gemv.gemv: partial(gemv_triton.gemv, call=paged_triton.trace),
        kv_write: partial(paged_triton.write, call=paged_triton.trace),
        rope.norm_rope: partial(rope_triton.norm_rope, call=paged_triton.trace),
        rope_write.norm_rope_write: partial(rope_triton.norm_rope_write, call=paged_triton.trace),
    }


ATTENTION = {paged_attention: paged.reference, paged_attention_out: paged.reference_out}
PLAIN = {**ATTENTION, kv_write: scatter}
"""Ops that a CUDA binary has kernels of, and what computes the same without them."""


def _require_device(target: Target) -> None:
    """Inductor and Triton ask the device in this process what to compile for."""
    if target.device == "cuda" and torch.cuda.get_device_capability() != target.compute_capability:
        here = ".".join(map(str, torch.cuda.get_device_capability()))
        wanted = ".".join(map(str, target.compute_capability or ()))
        raise RuntimeError(
            f"error: the GPU that workers see has compute capability {here}, the build is for {wanted}: "
            "choose one with CUDA_VISIBLE_DEVICES"
        )


def _fake(symbols: _torch_build.Symbols, text: str, device: str) -> torch.Tensor:
    dtype, sizes, strides = parse_layout(text)
    shape = [compute(size, symbols.values) for size in sizes]
    stride = None if strides is None else [compute(stride, symbols.values) for stride in strides]
    return symbols.tensor(shape, stride, dtype, device)


def check_piece(job: CheckJob) -> dict[str, Any]:
    """Load the binary and compare it with eager at every point.

    Returns:
        {"proof": [{"shape", "max_rel_err", "tolerance", "excused", "form"}], "unproved": [{"shape", "reason"}]}

    Raises:
        ProofError: names the result, the point and the error.
    """
    import_ops(job.ops)
    graph, layouts = parse_graph(job.text)
    run = _torch_run.runner(Path(job.library), torch.device(job.device)) if job.library else _as_python(job.rewritten)
    compiled = [node for node in graph.nodes if node.target in PLAIN] if job.device == "cuda" or not job.library else []
    attention = [node for node in compiled if node.target in ATTENTION]
    given = list(graph.find_nodes(op="placeholder"))[:6]
    if any(list(node.args[:6]) != given for node in attention):
        reason = "arguments of attention are made in the piece: made-up ones would not fit together"
        return {
            "proof": [],
            "unproved": [{"shape": point_label(job.points[0]), "reason": reason}] if job.points else [],
        }
    for node in compiled:  # not the kernels that the binary has, too
        node.target = PLAIN[node.target]
    eager = fx.GraphModule({}, placed(graph, torch.device(job.device)))
    form = "" if job.library else "cpu"
    proof, unproved = [], []
    budget, most = _afforded(job.device, job.share)
    random = any(map(_torch_build.draws, graph.nodes))
    waiting = list(job.points)
    while waiting:
        wanted = waiting.pop(0)
        point = affordable(job.text, wanted, job.lowest, budget, most)
        label = point_label(wanted if point is None else point)
        if point is None:
            unproved.append({"shape": label, "reason": f"its tensors take more than {most / 2**20:.3g} MiB"})
            continue
        try:
            errors = _check_point(eager, run, job, layouts, point, bool(attention))
        except torch.OutOfMemoryError:  # others have taken what was free
            errors = None
        if errors is None:
            torch.cuda.empty_cache()
            budget, most = budget // 4, most // 4
            waiting.insert(0, wanted)
            continue
        if random:
            unproved.append({"shape": label, "reason": "it draws random numbers: it ran, and was not compared"})
        else:
            proof.append({"shape": label, "form": form, **errors})
    return {"proof": proof, "unproved": unproved}


def _as_python(text: str) -> _torch_run.Piece:
    """A piece that runs on the CPU as its text says."""
    graph, _ = parse_graph(text)
    for node in graph.nodes:
        node.target = PLAIN.get(node.target, node.target)
    module = fx.GraphModule({}, placed(graph, torch.device("cpu")))
    return lambda inputs: list(module(*inputs))


def _check_point(
    eager: fx.GraphModule, run: _torch_run.Piece, job: CheckJob, layouts: Sequence[str], point: Mapping[str, int],
    paged_arguments: bool,
) -> dict[str, Any]:  # fmt: skip
    """One comparison; empty for what draws random numbers."""
    inputs = [
        drawn(layout, point, values, job.device, seed)
        for seed, (layout, values) in enumerate(zip(layouts, job.values, strict=True))
    ]
    label = point_label(point)
    if paged_arguments:
        paged.make_up(*inputs[:6])
    copies = [copied(tensor) for tensor in inputs]
    with torch.no_grad():
        results = _eager(eager, copies, label)
        found = run([*inputs])
    if any(map(_torch_build.draws, eager.graph.nodes)):
        return {}
    return compare([*found, *inputs], [*results, *copies], len(results), job.text, label)


def _eager(eager: fx.GraphModule, inputs: list[torch.Tensor], label: str) -> tuple[torch.Tensor, ...]:
    """Run before the binary, which an index out of bounds would end together with its process."""
    try:
        results: tuple[torch.Tensor, ...] = eager(*inputs)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:
        raise MadeUpError(f"{label}: {str(error).partition(chr(10))[0]}") from error
    return results


def time_piece(job: TimeJob) -> dict[str, Any]:
    """Time two binaries at every point, in turns: on a GPU inside CUDA graphs, without the host's work.

    Returns:
        {"times": [{"shape", "fused_us", "apart_us"}]}
    """
    import_ops(job.ops)
    device = torch.device(job.device)
    pieces = {name: _torch_run.runner(Path(getattr(job, name)), device) for name in ("fused", "apart")}
    _, layouts = parse_graph(job.text)
    budget, most = _afforded(job.device, 1)
    times = {}
    for wanted in job.points:
        point = affordable(job.text, wanted, job.lowest, budget, most)
        if point is None or point_label(point) in times:
            continue
        try:
            inputs = [
                drawn(layout, point, values, job.device, seed)
                for seed, (layout, values) in enumerate(zip(layouts, job.values, strict=True))
            ]
            with torch.no_grad():
                calls = {name: _call(run, inputs, job.device) for name, run in pieces.items()}
                wait = torch.cuda.synchronize if job.device == "cuda" else None
                found = measure(calls, ROUNDS, wait)
        except torch.OutOfMemoryError:
            continue  # a build does not fail for want of a time
        many = CAPTURED if job.device == "cuda" else 1
        times[point_label(point)] = {f"{name}_us": round(found[name].step_us / many, 3) for name in calls}
    return {"times": [{"shape": shape, **line} for shape, line in times.items()]}


def _call(run: _torch_run.Piece, inputs: list[torch.Tensor], device: str) -> Callable[[], object]:
    """A call of a piece; on a GPU a graph of `CAPTURED` calls."""
    if device == "cpu":
        return partial(run, inputs)
    run(inputs)  # loads its kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            run(inputs)
    return graph.replay


ROUNDS = 20
"""How often two binaries are timed in turns."""
CAPTURED = 20
"""Calls in a graph: so many that starting it takes no part of the time."""

HELD = 8
"""How many times the bytes that `affordable` counts a check holds at its peak: inputs and results twice, and a tensor
that is made up in single precision, scaled and rounded."""


class MadeUpError(Exception):
    """The model has no answer to made-up inputs: integers that are indices, most of the time."""


def _afforded(device: str, share: int) -> tuple[int, int]:
    """Bytes of the largest tensors in a check, one of `share` at a time; and twice that of the lowest sizes, which have
    large weights in few pieces: not all checks at once are theirs."""
    free = _free_bytes(device) // HELD
    return min(POINT_BYTES, free // share), min(4 * POINT_BYTES, 2 * free // max(share, 2))


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
