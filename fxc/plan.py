"""A spec to all that has to be made: graphs, pieces, units, and the manifest but for what compiling adds."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save as save_tensors

from fxc import graph_files, identity, lower, model_weights, prove, rewrite, stitch, trace, verification
from fxc._torch_build import OpOverload, schema
from fxc.aside import kept_aside
from fxc.cache import key
from fxc.cases import cover
from fxc.errors import TraceError
from fxc.graph_run import seeded
from fxc.jobs import UserOps
from fxc.manifest import FORMAT, Constant, CustomOp, Factor, Input, Manifest, Piece, Program, Source, Weight
from fxc.models import ModelSource, cache_inputs, expected_ops, instantiate, reads, resolve
from fxc.ops import backends
from fxc.output import common_results
from fxc.partition import Partition, check_splitting_ops, partition
from fxc.passes import Pass
from fxc.records import Record
from fxc.region import OWN_NAMESPACES, Call
from fxc.shapes import Range
from fxc.spec import Spec, check_spec
from fxc.target import Target
from fxc.traced import Traced
from fxc.tuning import Tuning


@dataclass(frozen=True)
class Plan:
    """Everything that a build will make, before anything is compiled or written."""

    manifest: Manifest
    """`binaries`, `proof` and `seconds` are still empty."""
    files: dict[str, bytes]
    """By name inside the rank's directory."""
    units: list[lower.Unit]
    parts: dict[str, Partition]
    """By name of the step, the graph that it is stitched from."""
    ops: UserOps
    """What registers custom ops."""
    seconds: dict[str, float]
    """trace, partition."""

    @property
    def inputs(self) -> list[str]:
        """Names of the program's arguments."""
        return [entry.name for entry in self.manifest.inputs]

    @property
    def weights(self) -> list[str]:
        """Names of weights and constants, in the order in which a step takes them."""
        return [entry.name for entry in (*self.manifest.weights, *self.manifest.constants)]

    @property
    def pieces(self) -> int:
        """Pieces between cuts and splitting ops, over all graphs."""
        return sum(len(part.statements) for part in self.parts.values())

    @property
    def unique(self) -> int:
        """Different compiled ones among them."""
        return len(stitch.unique_pieces(self.parts.values()))


def make_plan(
    spec: Spec, directory: Path, target: Target, extra: Sequence[Pass] = (), record: Record | None = None,
    tuning: Tuning | None = None,
) -> Plan:  # fmt: skip
    """Trace, partition, run passes. Writes nothing.

    Args:
        extra: passes that run after all others.
        record: the GPU that the target is, where that is not here; `virtual.activate` was called with it.
        tuning: configurations of kernels that were timed on such a GPU.

    Raises:
        SpecError: the model or a pass cannot be found or constructed.
        TraceError: it cannot be traced.
        PassError: a pass failed, or did not match as often as it has to.
    """
    start, began = time.perf_counter(), time.time_ns()
    with reads.recorded(directory) as read, seeded(spec.device):
        passes, pass_files = rewrite.passes(spec, directory, target, extra)
        source = resolve(spec, directory)
        check_splitting_ops(spec.partition.splitting_ops)
        spec = msgspec.structs.replace(spec, inputs=dict(source.inputs), dims=dict(source.dims))
        check_spec(spec, source.name)
        model = instantiate(source)
        inputs, dims = cache_inputs(model)
        spec = msgspec.structs.replace(spec, inputs={**spec.inputs, **inputs}, dims={**spec.dims, **dims})
        weights, all_names = model_weights.find(model)
        shared = model_weights.shared(model)
        expected = expected_ops(model)
        read_files = {*source.sources, *pass_files, *map(Path, trace.model_files(model))}
        trace.with_fake_weights(model, spec.device)
        traces = _trace(spec, model, expected)
    model_weights.check_shared(shared, traces)
    for traced in traces:
        read_files |= set(map(Path, trace.source_files(traced.graph)))
    read_files |= reads.imported(read_files) | read.files()
    del model
    gc.collect()
    traced_at = time.perf_counter()
    ops = spec.partition.splitting_ops
    chosen = backends.choose(target)
    compiled = {
        name: out for backend in chosen.values() for name, out in backend.compiled.items() if spec.compile.level
    }
    level = spec.compile.level if record is None else min(spec.compile.level, rewrite.TIMED - 1)  # there is no clock
    found = rewrite.Found(passes, target, level)
    whole = {name: found.whole(traced, name) for name, traced in ((f"step_{i}", t) for i, t in enumerate(traces))}
    parts = {name: partition(traced, ops, compiled) for name, traced in whole.items()}
    records = identity.sources(sorted(read_files), read.variables, directory, began)
    manifest, files, units = _assemble(spec, source, target, parts, weights, all_names, records, found, record, tuning)
    paths = (os.path.abspath(directory / name) if name.endswith(".py") else name for name in source.imports)
    user_ops = UserOps(tuple(paths), str(directory), identity.files(records, directory))
    seconds = {"trace": traced_at - start, "partition": time.perf_counter() - traced_at}
    return Plan(manifest, files, units, parts, user_ops, seconds)


def _trace(spec: Spec, model: torch.nn.Module, expected: Mapping[str, int]) -> list[Traced]:
    box = Range(tuple((name, dim.min, dim.max) for name, dim in spec.dims.items()))
    points = [point for r in (*spec.sizes(), *spec.ranges()) for point in (r.low(), r.high())]
    with kept_aside():
        traces = cover(box, lambda part: trace.capture(model, spec.inputs, part, spec.device), points)
    for name, count in expected.items():
        for traced in traces:
            found = sum(_qualified(node) == name for node in traced.graph.nodes)
            if found != count:
                raise TraceError(
                    f"the traced graph calls {name} {found} times, expected {count}",
                    "a part of the model has attention of its own; it cannot be built from a Hugging Face folder",
                )
    return traces


def _qualified(node: torch.fx.Node) -> str:
    return str(schema(node.target).name) if isinstance(node.target, OpOverload) else ""


def _assemble(
    spec: Spec, source: ModelSource, target: Target, parts: Mapping[str, Partition], weights: Mapping[str, Weight],
    names: set[str], records: Sequence[Source], found: rewrite.Found, record: Record | None, tuning: Tuning | None,
) -> tuple[Manifest, dict[str, bytes], list[lower.Unit]]:  # fmt: skip
    """The manifest, the files of the rank's directory, and what has to be compiled."""
    traces = [part.traced for part in parts.values()]
    used_weights, constants = _used(traces, weights)
    unique = stitch.unique_pieces(parts.values())
    numbers = {digest: f"piece_{index}" for index, digest in enumerate(unique)}
    programs, units = _programs(spec, parts, target, numbers, found, record, tuning)
    title = f"{source.name}, traced by fxc {identity.fxc_version()}."
    order = [weight.name for weight in used_weights] + list(constants)
    functions = {digest: call.piece.text for digest, call in unique.items()} if spec.compile.level == 0 else None
    code = stitch.stitch(parts, list(spec.inputs), order, title, functions)
    texts = {
        "transformed_code.py": code,
        "computation_graph.py": graph_files.graph_file(title, parts),
        "pieces.py": graph_files.pieces_file(title, unique, numbers),
    }
    files = {name: text.encode() for name, text in texts.items()}
    if constants:
        files["constants.safetensors"] = save_tensors(constants)
    if units:
        files[verification.FILE] = verification.encode(units, numbers)
    mutated = set().union(*(traced.mutated for traced in traces))
    unused = sorted(names - {name for weight in used_weights for name in (weight.name, *weight.aliases)})
    custom_ops = _custom_ops(parts.values(), source.imports)
    bound = msgspec.json.encode([used_weights, unused, custom_ops])
    factors = _factors(
        spec, target, code, unique, programs, files.get("constants.safetensors", b""), bound, found.identity, units
    )
    manifest = Manifest(
        hash=identity.content_key(factors),
        fxc=identity.fxc_version(),
        created="",
        model=source.name,
        spec=spec,
        target=target,
        factors=factors,
        inputs=tuple(
            Input(
                name=name,
                shape=entry.shape,
                dtype=entry.dtype,
                values=entry.values,
                mutated=name in mutated,
                pad=entry.pad,
                bound=entry.bound,
            )
            for name, entry in spec.inputs.items()
        ),
        outputs=stitch.output_text(traces[0].output),
        results=common_results(traces),
        weights=tuple(msgspec.structs.replace(w, mutated=w.name in mutated) for w in used_weights),
        constants=tuple(
            Constant(name=name, shape=tuple(tensor.shape), dtype=_dtype(tensor), mutated=name in mutated)
            for name, tensor in constants.items()
        ),
        unused_weights=tuple(unused),
        programs=programs,
        pieces={name: _pieces(part, numbers) for name, part in parts.items()},
        binaries={},
        passes=found.reports(),
        custom_ops=custom_ops,
        backends=_backends(traces, target),
        sources=tuple(records),
        tuning="" if tuning is None else tuning.digest,
        verified=record is None or not spec.compile.level,
        tolerances=prove.TOLERANCES,
    )
    return manifest, files, units


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _used(traces: Iterable[Traced], weights: Mapping[str, Weight]) -> tuple[list[Weight], dict[str, torch.Tensor]]:
    """Weights, and constants with their values, that some graph reads, in order of first appearance."""
    found: dict[str, Weight] = {}
    constants: dict[str, torch.Tensor] = {}
    for traced in traces:
        for node in traced.graph.find_nodes(op="placeholder"):
            role, name = node.meta["role"]
            if role == "weight" and node.users:
                found.setdefault(name, weights[name])
            elif role == "constant" and node.users and name not in constants:
                # Not a view of another one's memory, which safetensors refuses to store.
                constants[name] = traced.constants[name].cpu().clone(memory_format=torch.contiguous_format)
    return list(found.values()), constants


def _programs(
    spec: Spec,
    parts: Mapping[str, Partition],
    target: Target,
    numbers: Mapping[str, str],
    found: rewrite.Found,
    record: Record | None,
    tuning: Tuning | None,
) -> tuple[tuple[Program, ...], list[lower.Unit]]:
    """One program per size, then one per range of the general program, cut where another graph begins."""
    programs: list[Program] = []
    units: dict[str, lower.Unit] = {}
    general = spec.ranges()
    for box in [*spec.sizes(), *general]:
        for step, part in parts.items():
            inner = _intersection(box, part.traced.range)
            if inner is None:
                continue
            keys = []
            for call in part.calls if spec.compile.level else ():
                name = numbers[call.piece.unique]
                plain = lower.unit(call.piece, inner, spec.compile.level, target, name, record)
                unit = found.rewritten(plain, name, box in general)
                unit = unit if tuning is None else tuning.apply(unit)
                keys.append(unit.key)
                units.setdefault(unit.key, unit)
            programs.append(Program(range=inner, step=step, binaries=tuple(keys)))
    return tuple(dict.fromkeys(programs)), list(units.values())


def _intersection(left: Range, right: Range) -> Range | None:
    bounds = tuple(
        (name, max(low, other_low), min(high, other_high))
        for (name, low, high), (_, other_low, other_high) in zip(left.bounds, right.bounds, strict=True)
    )
    return Range(bounds) if all(low <= high for _, low, high in bounds) else None


def _pieces(part: Partition, numbers: Mapping[str, str]) -> tuple[Piece, ...]:
    return tuple(
        Piece(numbers[s.piece.unique], "compiled", s.piece.unique, s.piece.ops, s.piece.dims)
        if isinstance(s, Call)
        else Piece(name=_qualified(s.node), kind="eager", unique=_qualified(s.node))
        for s in part.statements
    )


def _backends(traces: Iterable[Traced], target: Target) -> dict[str, str]:
    """What computes each attention op that the graphs call."""
    called = {node.target for traced in traces for node in traced.graph.nodes}
    return {str(op): backend.name for op, backend in backends.choose(target).items() if op in called}


def _custom_ops(parts: Iterable[Partition], imports: Sequence[str]) -> tuple[CustomOp, ...]:
    """Ops outside aten, and what registers them."""
    names: set[str] = set()
    for part in parts:
        for statement in part.statements:
            if isinstance(statement, Call):
                names |= {schema.partition("(")[0].partition(".")[0] for schema in statement.piece.custom_ops}
            else:
                names.add(_qualified(statement.node))
    owners = {name: "fxc.ops" if name.startswith("fxc::") else (imports[0] if imports else "") for name in names}
    own = tuple(f"{namespace}::" for namespace in OWN_NAMESPACES)
    return tuple(CustomOp(name=name, module=owners[name]) for name in sorted(names) if not name.startswith(own))


def _factors(
    spec: Spec, target: Target, code: str, unique: Mapping[str, Call], programs: Sequence[Program], constants: bytes,
    bound: bytes, passes: str, units: Sequence[lower.Unit],
) -> tuple[Factor, ...]:  # fmt: skip
    """What the artifact's name digests, in order. Not capture sizes, graph mode, ranks, paths, users or environment."""
    every = (one for unit in units for one in (unit, *(form for _, form in unit.forms)))
    tuned = [one for one in every if one.tuning]
    body = code[code.index('"""', 3) + 3 :]  # without the title
    pairs = [
        ("format", str(FORMAT)),
        ("fxc", identity.fxc_version()),
        ("graph", key.digest(body + "\n".join(call.piece.text for call in unique.values()))),
        ("ops", " ".join(sorted({schema for call in unique.values() for schema in call.piece.custom_ops}))),
        ("inputs", msgspec.json.encode(spec.inputs).decode()),
        ("dims", msgspec.json.encode(spec.dims).decode()),
        ("programs", " ".join(program.range.label for program in programs)),
        ("level", str(spec.compile.level)),
        ("lowering", lower.VERSION),
        ("passes", passes),
        ("constants", key.digest(constants)),
        (
            "kernels",
            lower.KERNELS
            if any(lower.calls_own(call.piece) for call in unique.values())
            or (target.device == "cuda" and any(call.piece.custom_ops for call in unique.values()))
            else "",
        ),
        ("weights", key.digest(bound)),
        ("tuning", key.digest("\n".join(f"{unit.scope} {unit.tuning}" for unit in tuned)) if tuned else ""),
        ("torch", target.torch),
        ("triton", target.triton),
        ("cuda", target.cuda),
        ("compiler", target.compiler),
        ("arch", target.arch),
        ("device", target.device),
        ("cpu_features", " ".join(target.cpu_features)),
        ("compute_capability", ".".join(map(str, target.compute_capability or ()))),
        ("properties", msgspec.json.encode(target.properties, order="deterministic").decode()),
    ]
    return tuple(Factor(name=name, value=value) for name, value in pairs)
