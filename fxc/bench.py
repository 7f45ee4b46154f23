"""Times a built program against its own traced graph in eager, with and without CUDA graphs, and against torch.compile.

All ways to run a size are timed in one process, in turns, on the same weights and inputs; each result is compared with
the compiled program's before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from fxc import _torch_run, eager, prove, refs, timing
from fxc.cache import Artifact
from fxc.capture_plan import Recorded
from fxc.errors import FxcError, RunError, UsageError
from fxc.graph_run import Role, seeded
from fxc.progress import Observer
from fxc.runtime import Program, loader
from fxc.shapes import point_label
from fxc.timing import Timing
from fxc.workload import Point, Workload, points, tokens

EAGER, COMPILED = "eager", "compiled"
GRAPHS = ("piecewise", "full")
PEERS: dict[str, str | None] = {"torch.compile": None, "reduce-overhead": "reduce-overhead"}
"""By name: the mode of torch.compile."""
ON_CPU = "CUDA graphs want a GPU, and this program runs on the CPU"
REPEATS = 20
SLACK = 10
"""A whole program may differ from another by so many times what a piece may: roundings add up from layer to layer."""

Call = Callable[..., Any]


class Captured(msgspec.Struct, frozen=True):
    """The CUDA graphs of one mode."""

    sizes: list[dict[str, int]]
    bytes: int
    """By which the free memory of the GPU went down."""
    seconds: float


class Measured(msgspec.Struct, frozen=True):
    """One size."""

    size: dict[str, int]
    """Value of each dimension that a call chooses."""
    tokens: int
    """Rows that a call computes: the product of the dimensions; with `kv_cache`, of one token for each request."""
    served_by: str
    """The program without graphs that serves it, `num_tokens=1..4096`."""
    own: bool
    """Whether that is one for this size, not a general one."""
    bytes_read: int
    """Of weights and of paged caches, what a call has to read."""
    roofline_us: float | None
    """The time that reading them takes at the bandwidth of a copy; null where that was not measured."""
    padding: dict[str, int]
    """By mode, the rows that are added to reach the captured size whose graph serves this one."""
    times: dict[str, Timing]
    """By variant."""
    errors: dict[str, float | None]
    """By variant, the relative difference from compiled; null where results cannot be compared."""
    missing: dict[str, str]
    """By variant that was not timed, why."""


class BenchResult(msgspec.Struct, frozen=True):
    """What `bench --json` prints."""

    hash: str
    model: str
    device: str
    """Name of the GPU, or `cpu`."""
    torch: str
    threads: int
    """That torch uses on the CPU."""
    repeats: int
    context: int | None
    """With `kv_cache`, tokens of each request that are in the cache; else null."""
    bandwidth: float | None
    """Bytes per second, read and written, of a copy in this run; null on the CPU."""
    weights: int
    """Bytes."""
    cache: int
    """Bytes of bound inputs."""
    variants: list[str]
    graphs: dict[str, Captured]
    """By mode that was captured."""
    sizes: list[Measured]


def bench(
    ref: str | Path, *, sizes: Sequence[int | Mapping[str, int]] | None = None, peers: Collection[str] = (),
    repeats: int = REPEATS, context: int | None = None, cache_dir: Path | None = None, observer: Observer | None = None,
) -> BenchResult:  # fmt: skip
    """Time what `ref` names. Nothing is built; torch.compile is used for `peers` alone.

    Args:
        ref: the prefix of a hash, the path of an artifact, or the model.yaml that it was built from.
        sizes: by default the program's, and one that is none of them.
        peers: names in `PEERS`: time torch.compile too, the same graph compiled for each size by itself.
        context: with `kv_cache`, tokens of each request that are in the cache; by default 1024, or as many as fit.

    Raises:
        CacheMissError: nothing is built.
        UsageError: a size that no program serves, or a context where there is no cache or that does not fit.
        RunError: the program fails on made-up inputs, or a variant gives another result than it.
    """
    artifact = refs.find(ref, cache_dir, use=True)
    manifest = artifact.manifest
    chosen = points(manifest, sizes)
    if context is not None and manifest.spec.kv_cache is None:
        raise UsageError(f"--context: {manifest.model} was built without kv_cache", "leave it out")
    load = partial(loader.load, ref, cache_dir=cache_dir)
    with torch.no_grad():
        return _Run(artifact, load, chosen, peers, repeats, context, observer or Observer()).result()


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Root mean square of the rows' relative errors, in the tensor where it is largest; infinite where shapes or dtypes
    differ. Of integers these alone are compared: a rounding error may change their values altogether."""
    kinds = [[(tensor.shape, tensor.dtype) for tensor in side] for side in (found, expected)]
    if kinds[0] != kinds[1]:
        return float("inf")
    pairs = zip(found, expected, strict=True)
    rows = [prove.row_errors(have, want) for have, want in pairs if want.is_floating_point() or want.is_complex()]
    return max((float(errors.square().mean().sqrt()) for errors in rows if errors.numel()), default=0.0)


def tensors(result: Any) -> list[torch.Tensor]:
    """Copies of the tensors in a result, in order."""
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.clone())
        return tensor

    _torch_run.tree_map(take, result)
    return found


class _Run:
    """One benchmark: what is loaded and made up once, and then a size at a time."""

    def __init__(
        self, artifact: Artifact, load: Callable[[], Program], chosen: Sequence[Point], peers: Collection[str],
        repeats: int, context: int | None, observer: Observer,
    ) -> None:  # fmt: skip
        self.artifact, self.manifest, self.load = artifact, artifact.manifest, load
        self.chosen, self.repeats, self.observer = chosen, repeats, observer
        self.program = load()
        self.graphs = eager.graphs(artifact)  # after the ops that they call are registered
        self.device = self.program.device
        self.work = Workload(self.program, chosen, context)
        self.held = self._held()
        self.variants = [EAGER, COMPILED, *GRAPHS, *peers]
        self.bandwidth = timing.copy_bandwidth(self.device) if self.device.type == "cuda" else None
        self.captured: dict[str, list[Recorded]] = {}
        self.missing: dict[str, str] = {}
        self.replays = {mode: program for mode in GRAPHS if (program := self._capture(mode)) is not None}
        if self.device.type == "cpu" and "reduce-overhead" in peers:
            self.missing["reduce-overhead"] = ON_CPU

    def result(self) -> BenchResult:
        device = self.device
        return BenchResult(
            hash=self.manifest.hash, model=self.manifest.model,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            torch=str(torch.__version__), threads=torch.get_num_threads(),
            repeats=self.repeats, context=self.work.context, bandwidth=self.bandwidth,
            weights=sum(tensor.nbytes for tensor in self.work.weights.values()),
            cache=sum(tensor.nbytes for tensor in self.work.bound.values()),
            variants=self.variants,
            graphs={mode: _sum(recorded) for mode, recorded in self.captured.items()},
            sizes=[*self._every_size()],
        )  # fmt: skip

    def _every_size(self) -> Iterator[Measured]:
        for point in self.chosen:
            self.observer.phase(label := point_label(point))
            start = time.perf_counter()
            yield self._measure(point)
            self.observer.phase_done(label, time.perf_counter() - start)

    def _held(self) -> dict[Role, torch.Tensor]:
        """What eager keeps from call to call; its constants are its own."""
        held: dict[Role, torch.Tensor] = {("weight", name): tensor for name, tensor in self.work.weights.items()}
        held |= {("input", name): tensor for name, tensor in self.work.bound.items()}
        folder = min(self.manifest.ranks, default="rank_0_0")
        constants = loader.constants(self.artifact, f"{folder}/{loader.CONSTANTS}", self.device)
        names = [constant.name for constant in self.manifest.constants]
        return held | {("constant", name): value for name, value in zip(names, constants, strict=True)}

    def _capture(self, mode: str) -> Program | None:
        """Another load of the program, which replays graphs; None, with a reason, where there are none."""
        program = self.load()
        self.work.bind(program)
        start = time.perf_counter()
        try:
            recorded = program.capture(mode=mode)
        except FxcError as error:
            self.missing[mode] = f"not captured: {error.message}"
            return None
        self.work.restore()
        if not recorded:
            none = "not captured: the program has no size that these graphs could be recorded for"
            self.missing[mode] = ON_CPU if self.device.type == "cpu" else none
            return None
        self.observer.phase_done(f"capture {mode}", time.perf_counter() - start)
        self.captured[mode] = recorded
        return program

    def _measure(self, point: Point) -> Measured:
        served = self.program.explain(**point)
        boxes = {program.range.label: program.range for program in self.manifest.programs}
        graph = self.graphs[served.step]
        inputs = self.work.inputs(point)
        calls, missing, padding = self._calls(point, graph)
        errors = self._check(calls, missing, graph, inputs, point_label(point))
        wait = partial(torch.cuda.synchronize, self.device) if self.device.type == "cuda" else None
        timed = {name: partial(calls[name], **inputs) for name in self.variants if name in errors}
        times = timing.measure(timed, self.repeats, wait)
        self.work.restore()
        read = self.work.bytes_read(point, graph.gathered())
        roofline = None if self.bandwidth is None else round(read / self.bandwidth * 1e6, 3)
        return Measured(
            size=point, tokens=tokens(self.manifest, point), served_by=served.serves,
            own=served.is_size or boxes[served.serves].free < max(box.free for box in boxes.values()),
            bytes_read=read, roofline_us=roofline, padding=padding, times=times, errors=errors, missing=missing,
        )  # fmt: skip

    def _calls(self, point: Point, graph: eager.Graph) -> tuple[dict[str, Call], dict[str, str], dict[str, int]]:
        """What runs `point`, by variant; which variants do not, and why; and the padding."""
        missing = dict(self.missing)
        padding: dict[str, int] = {}
        calls: dict[str, Call] = {COMPILED: self.program, EAGER: graph.module(self.held, self.device)}
        for mode, program in self.replays.items():
            choice = program.explain(**point).graph
            if choice is not None and choice.mode == mode:
                calls[mode], padding[mode] = program, choice.padding
            else:
                missing[mode] = "no graph" if choice is None else choice.why
        for name, how in PEERS.items():
            if name in self.variants and name not in missing:
                calls[name] = graph.module(self.held, self.device).compiled(how)
        return calls, missing, padding

    def _check(
        self, calls: Mapping[str, Call], missing: dict[str, str], graph: eager.Graph,
        inputs: Mapping[str, torch.Tensor], label: str,
    ) -> dict[str, float | None]:  # fmt: skip
        """Run every variant once and compare its result with that of the compiled program.

        Returns:
            For each variant that runs, its error. Others join `missing`: eager, say, where an op wants a compiler that
            is not here.

        Raises:
            RunError: the program fails, or a result is another one.
        """
        changing = graph.draws or any(constant.mutated for constant in self.manifest.constants)
        limit = SLACK * prove.tolerance(graph.text)
        errors: dict[str, float | None] = {}
        expected: list[torch.Tensor] = []
        for name in (COMPILED, *(other for other in calls if other != COMPILED)):
            try:
                found = self._once(calls[name], inputs)
            except Exception as error:
                missing[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                if name != COMPILED:
                    continue
                hint = "give the inputs `values: [low, high]` that it has answers to"
                raise RunError(f"{name} fails on made-up inputs at {label}: {missing[name]}", hint) from error
            if name == COMPILED:
                expected = found
            errors[name] = None if changing else difference(found, expected)
            if not changing and not errors[name] <= limit:  # type: ignore[operator]
                raise RunError(
                    f"{name} does not give what compiled gives at {label}: relative difference {errors[name]:.3g}, "
                    f"accepted is {limit:.3g}",
                    "`fxc build --force` proves the program anew",
                )
        return errors

    def _once(self, call: Call, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        written = {entry.name for entry in self.manifest.inputs if entry.mutated}
        given = {name: tensor.clone() if name in written else tensor for name, tensor in inputs.items()}
        self.work.restore()
        with seeded(self.device.type):
            return tensors(call(**given))


def _sum(recorded: Sequence[Recorded]) -> Captured:
    sizes = [entry.size for entry in recorded]
    return Captured(sizes, sum(entry.bytes for entry in recorded), sum(entry.seconds for entry in recorded))
