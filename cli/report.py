"""Artifacts and results in words and tables."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from fxc import capture_plan, machine
from fxc.cache import Artifact
from fxc.cache.store import Summary
from fxc.cli import render
from fxc.manifest import Manifest, PassReport, Tensor
from fxc.ranks import Ranks

if TYPE_CHECKING:
    from fxc.pipeline import BuildResult
    from fxc.ready import WarmResult
    from fxc.ready_ranks import RanksResult
    from fxc.tune import Tuned


def built(result: BuildResult) -> None:
    """One line about a build."""
    took = render.duration(result.seconds["total"])
    pieces = f"{render.count(result.pieces, 'piece')}, {result.unique_pieces} unique"
    if result.hit:
        render.line(f"in the cache: {pieces} ({took})")
    else:
        compiled, reused = result.binaries["compiled"], result.binaries["reused"]
        render.line(f"built: {pieces}; {render.count(compiled, 'binary')} compiled, {reused} reused ({took})")
    for entry in result.passes:
        if entry.missed:
            render.line(f"warning: {_missed(entry)}")
    if not result.verified:
        render.line("not verified: no device of its kind was here; on one, `fxc verify --run`")
    if not result.proved:
        render.line("not compared with eager: it was built with --no-prove")
    elif result.unproved:
        first = result.unproved[0]
        points = render.count(len(result.unproved), "point")
        render.line(f"{points} not compared with eager ({first.piece[:12]} at {first.shape}: {first.reason})")


def _missed(entry: PassReport) -> str:
    misses = [(site, miss) for site in entry.sites for miss in site.near_misses]
    site, miss = misses[0]
    more = f", and {len(misses) - 1} more: see `fxc inspect`" if len(misses) > 1 else ""
    return f"pass {entry.name} matched nothing: {miss.node} of {site.piece} at {site.shape}: {miss.reason}{more}"


def ranks_warmed(result: RanksResult) -> None:
    """`warmed` for each rank."""
    for entry in result.ranks:
        warmed(entry, f"rank {Ranks(entry.rank, entry.world_size, entry.dp_rank).label} ready")


def warmed(result: WarmResult, what: str = "ready") -> None:
    """A line about a warm-up, and one about graphs where there could be some."""
    render.line(f"{what}: {render.phases(result.seconds)}")
    if not result.verified:
        render.line(f"not verified: built without a device of its kind; `fxc verify {result.hash[:12]} --run`")
    if result.graphs:
        kinds = ", ".join(f"{count} {mode}" for mode, count in result.graphs.items())
        render.line(f"CUDA graphs: {kinds}; they took {render.size_bytes(result.graph_bytes)}")
    elif result.not_captured:
        render.line(f"no CUDA graphs: {result.not_captured}")


def tuned(result: Tuned, verbose: bool) -> None:
    """`fxc tune` for people: the largest gains first."""
    entries = sorted(result.kernels.values(), key=lambda entry: entry.us - (entry.rules_us or math.inf))
    shown = entries if verbose else entries[:8]
    rows = [
        (
            entry.name, "-" if entry.rules_us is None else f"{entry.rules_us:g}", f"{entry.us:g}",
            " ".join(f"{name}={value}" for name, value in entry.configuration.items()),
        )
        for entry in shown
    ]  # fmt: skip
    faster = sum(entry.configuration != entry.rules for entry in entries)
    title = f"{render.count(len(entries), 'kernel')}, {faster} faster than by the rules that `--target` goes by"
    title += f", the first {len(shown)}" if len(entries) > len(shown) else ""
    if rows:
        render.table(title, ("kernel", "rules, µs", "tuned, µs", "configuration"), rows, ("rules, µs", "tuned, µs"))
    count = render.count(len(entries), "kernel")
    render.line(f"{count} of {result.device}" + (f" in {result.record}" if result.record else ": there is no record"))


def listed(entry: Summary) -> dict[str, Any]:
    """One artifact of `ls --json`; model, sizes and device are null where manifest.json is damaged."""
    manifest: Manifest | None = entry.manifest
    return {
        "hash": entry.hash,
        "model": manifest.model if manifest else None,
        "sizes": manifest.sizes if manifest else None,
        "device": manifest.target.device if manifest else None,
        "bytes": entry.bytes,
        "created": entry.created,
        "last_used": entry.last_used,
        "path": entry.path,
        "read_only": entry.read_only,
    }


def listing(entries: list[Summary]) -> None:
    """The table of `ls`."""
    now = time.time()
    layered = any(entry.read_only for entry in entries)
    rows = [
        (
            entry.hash,
            entry.manifest.model if entry.manifest else "damaged",
            render.shown_sizes(entry.manifest) if entry.manifest else "",
            entry.manifest.target.device if entry.manifest else "",
            render.size_bytes(entry.bytes),
            render.ago(now - entry.created),
            render.ago(now - entry.last_used),
            *((entry.path if entry.read_only else "",) if layered else ()),
        )
        for entry in entries
    ]
    header = ("hash", "model", "sizes", "device", "bytes", "age", "last use", *(("read-only",) if layered else ()))
    render.table("", header, rows, numbers=("bytes", "age", "last use"))


def show(artifact: Artifact, *, verbose: bool) -> None:
    """`inspect` for people. Long lists are shortened unless `verbose`."""
    manifest = artifact.manifest
    render.table("", ("", ""), _facts(artifact))
    _layouts(manifest, verbose)
    _programs(manifest)
    _passes(manifest, verbose)
    _binaries(manifest)
    _kernels(manifest, verbose)
    factors = [(factor.name, factor.value if verbose else _short(factor.value)) for factor in manifest.factors]
    render.table("key", ("factor", "value"), factors)
    _proof(manifest, verbose)


def _facts(artifact: Artifact) -> list[tuple[str, str]]:
    manifest = artifact.manifest
    target = manifest.target
    built_for = [target.device, target.arch, f"torch {target.torch}"]
    if target.compute_capability:
        built_for.append("compute capability {}.{}".format(*target.compute_capability))
        built_for += [f"CUDA {target.cuda}", f"triton {target.triton}"]
    facts = [
        ("hash", manifest.hash),
        ("path", str(artifact.path)),
        ("model", manifest.model),
        ("dims", ", ".join(f"{name} {dim.min}..{dim.max}" for name, dim in manifest.spec.dims.items())),
        ("sizes", render.shown_sizes(manifest)),
        ("pieces", _pieces(manifest)),
        ("outputs", manifest.outputs),
        ("machine", ", ".join(built_for)),
        ("built for", "" if manifest.verified else f"{target.properties.get('name')}, without one: not verified"),
        ("features", " ".join(target.cpu_features)),
        ("needs", ", ".join(f"{name} {version}" for name, version in machine.needs_of(manifest).items())),
        ("compiler", target.compiler),
        ("fxc", manifest.fxc),
        ("created", manifest.created),
        ("ranks", " ".join(sorted(manifest.ranks))),
        ("attention by", ", ".join(f"{name} ({op})" for op, name in manifest.backends.items())),
        ("custom ops", ", ".join(f"{op.name} ({op.module})" for op in manifest.custom_ops)),
        ("sources", ", ".join(source.file for source in manifest.sources)),
        ("seconds", render.phases(manifest.seconds)),
        ("graphs", _graphs(artifact)),
    ]
    return [(name, value) for name, value in facts if value]


def _graphs(artifact: Artifact) -> str:
    """What the last captures took: `51 full, 51 piecewise, 0.8 GB in 1.4 s on NVIDIA H200`."""
    plan = capture_plan.read(capture_plan.beside(artifact.path))
    if plan is None:
        return ""
    kinds = Counter(graph.mode for graph in plan.graphs)
    seconds = sum(graph.seconds for graph in plan.graphs)
    parts = ", ".join(f"{count} {mode}" for mode, count in kinds.items())
    return f"{parts}, {render.size_bytes(sum(plan.bytes.values()))} in {render.duration(seconds)} on {plan.device}"


def _pieces(manifest: Manifest) -> str:
    """`9: 5 compiled calls of 3 unique pieces, 4 fxc::attention`."""
    pieces = [piece for step in manifest.pieces.values() for piece in step]
    compiled = [piece.unique for piece in pieces if piece.kind == "compiled"]
    eager = Counter(piece.name for piece in pieces if piece.kind == "eager")
    calls = f"{render.count(len(compiled), 'compiled call')} of {render.count(len(set(compiled)), 'unique piece')}"
    return f"{len(pieces)}: " + ", ".join([calls, *(f"{count} {name}" for name, count in eager.items())])


def _layouts(manifest: Manifest, verbose: bool) -> None:
    inputs = [(entry.name, _layout(entry), "written" if entry.mutated else "") for entry in manifest.inputs]
    render.table("inputs", ("name", "layout", ""), inputs)
    weights = [(weight.name, _layout(weight), " ".join(weight.aliases)) for weight in manifest.weights]
    limit = len(weights) if verbose else 8
    more = f", the first {limit}" if len(weights) > limit else ""
    render.table(f"{render.count(len(weights), 'weight')}{more}", ("name", "layout", "also"), weights[:limit])


def _programs(manifest: Manifest) -> None:
    rows = [(p.range.label, p.step, render.count(len(p.binaries), "piece")) for p in manifest.programs]
    render.table("programs", ("serves", "step", "compiled"), rows)


def _passes(manifest: Manifest, verbose: bool) -> None:
    passes = [(p.name, str(p.matches), str(sum(len(s.near_misses) for s in p.sites))) for p in manifest.passes]
    header = ("name", "matches", "near misses")
    render.table("passes" if passes else "no passes", header, passes, header[1:])
    sites = [(entry.name, site) for entry in manifest.passes for site in entry.sites]
    misses = [(name, s.piece, s.shape, miss.node, miss.reason) for name, s in sites for miss in s.near_misses]
    limit = len(misses) if verbose else 8
    more = f", the first {limit}" if len(misses) > limit else ""
    if misses:
        render.table(f"near misses{more}", ("pass", "piece", "shape", "node", "reason"), misses[:limit])
    timed = [
        (name, s.piece, line.shape, f"{line.fused_us:g}", f"{line.apart_us:g}", "kept" if line.kept else "left out")
        for name, s in sites
        for line in s.timed
    ]
    if timed:
        columns = ("pass", "piece", "at", "fused, µs", "apart, µs", "")
        render.table("fusions, timed", columns, timed, columns[3:5])
    found = [(name, s.piece, s.shape, " ".join(s.matches)) for name, s in sites if s.matches]
    if verbose and found:
        render.table("matches", ("pass", "piece", "shape", "nodes"), found)


def _binaries(manifest: Manifest) -> None:
    rows = [
        (key[:12], binary.piece[:12], binary.range, render.size_bytes(binary.bytes), render.duration(binary.seconds))
        for key, binary in manifest.binaries.items()
    ]
    total = render.size_bytes(sum(binary.bytes for binary in manifest.binaries.values()))
    title = f"{render.count(len(rows), 'binary')}, {total}"
    render.table(title, ("key", "piece", "range", "bytes", "compiled in"), rows, ("bytes", "compiled in"))


def _kernels(manifest: Manifest, verbose: bool) -> None:
    """Those that spill first, then those that take most registers."""
    pairs = [(binary, kernel) for binary in manifest.binaries.values() for kernel in binary.kernels]
    pairs.sort(key=lambda pair: (-pair[1].stack, -pair[1].registers, pair[1].name))
    limit = len(pairs) if verbose else 8
    rows = [
        (
            kernel.name, binary.piece[:12], binary.range, str(kernel.registers), render.size_bytes(kernel.stack),
            render.size_bytes(kernel.shared), str(kernel.warps), kernel.chosen,
        )
        for binary, kernel in pairs[:limit]
    ]  # fmt: skip
    if rows:
        more = f", the first {limit}" if len(pairs) > limit else ""
        title = f"{render.count(len(pairs), 'kernel')} for {pairs[0][1].arch}{more}"
        header = ("kernel", "piece", "range", "registers", "spilled", "shared", "warps", "chosen by")
        render.table(title, header, rows, header[3:7])


def _proof(manifest: Manifest, verbose: bool) -> None:
    if not manifest.proof:
        render.line("\nproof: none")
        return
    if verbose:
        rows = [(p.piece[:12], p.shape, f"{p.max_rel_err:.2e}", f"{p.tolerance:.0e}") for p in manifest.proof]
        render.table("proof", ("piece", "shape", "error", "accepted"), rows, ("error", "accepted"))
        missing = [(entry.piece[:12], entry.shape, entry.reason) for entry in manifest.unproved]
        render.table("not compared" if missing else "", ("piece", "shape", "reason"), missing)
        return
    worst = max(manifest.proof, key=lambda proof: proof.max_rel_err)
    checks = render.count(len(manifest.proof), "check")
    checks += f" ({len(manifest.unproved)} points could not be compared)" if manifest.unproved else ""
    render.line(f"\nproof: {checks} against eager, largest relative error {worst.max_rel_err:.2e} ({worst.shape})")


def _layout(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{', '.join(str(part) for part in tensor.shape)}]"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 80 else flat[:77] + "..."
