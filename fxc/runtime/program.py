"""`Program`: what `fxc.load` returns. A callable that checks its inputs, picks a step by their shapes and runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, SupportsIndex

import msgspec
import torch
from torch import nn

from fxc import capture_plan
from fxc.capture_plan import Mode, Recorded
from fxc.convert import nearest
from fxc.errors import FxcError, InputError, RunError, UsageError
from fxc.manifest import Manifest
from fxc.runtime import capture_sizes, dispatch, weights
from fxc.runtime.choice import MODES, Choice
from fxc.runtime.graphs import CaptureError, Counters, Graphs, Wish
from fxc.runtime.inputs import check_bound, plain, refuse
from fxc.runtime.recorder import Recorder
from fxc.runtime.step import StepFactory
from fxc.shapes import Range, select
from fxc.spec import CudagraphSpec


class Explanation(msgspec.Struct, frozen=True):
    """Which program serves a shape, and why. `str()` of it is one line."""

    serves: str
    """Label of the size or range, `num_tokens=8`."""
    is_size: bool
    step: str
    """The function in transformed_code.py."""
    why: str
    graph: Choice | None = None
    """Which CUDA graph is replayed, and why; None before `capture`."""

    def __str__(self) -> str:
        text = f"{self.serves} ({self.step}): {self.why}"
        return f"{text}; {self.graph}" if self.graph else text


class Program:
    """A loaded program. Calls from several threads are right on cpu, and take turns inside each compiled piece; on cuda
    one thread at a time may call. Nothing is compiled, and no file is read, by a call."""

    def __init__(
        self, manifest: Manifest, device: torch.device, factories: Sequence[StepFactory],
        constants: Sequence[torch.Tensor], *, cudagraph: CudagraphSpec | None = None, path: Path | None = None,
        recorder: Callable[[torch.device], Recorder] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            cudagraph: what `capture` does by default; what the manifest says if absent.
            path: of the artifact.
            recorder: what records graphs; by default on cuda alone.
        """
        self.manifest = manifest
        self.cudagraph = cudagraph or manifest.spec.cudagraph
        self.device = device
        self.ranges: tuple[Range, ...] = tuple(program.range for program in manifest.programs)
        self.dispatch_code = ""
        """Text of the generated function that checks inputs and picks a step, once all is bound; for readers."""
        self._factories = tuple(factories)
        self._constants = tuple(constants)
        self._weights: Sequence[torch.Tensor] | None = None if manifest.weights else ()
        self._inputs: dict[str, torch.Tensor] = {}
        self._bound: dict[str, int] | None = None if any(entry.bound for entry in manifest.inputs) else {}
        self._path = path
        self._recorder = recorder or (Recorder if device.type == "cuda" else None)
        self._lock = Lock()
        self._graphs: Graphs | None = None
        self._call: Callable[..., Any] = self._unbound
        self._steps: list[Callable[..., Any]] = []
        self._ready()

    @property
    def sizes(self) -> tuple[int | dict[str, int], ...]:
        """Sizes with a program of their own, spelled as in model.yaml: 8, or {batch: 1, tokens: 128}."""
        return tuple(self.manifest.sizes)

    def bind(self, source: weights.Source, *, strict: bool | None = None) -> Program:
        """Give the program its weights, by name; returns the program. May be called again with others.

        source: a .safetensors file, a folder of them (with or without model.safetensors.index.json) or a list of
            files; a mapping of name to tensor; or an nn.Module, whose parameters and buffers are taken. Tensors of a
            mapping or module are used as they are, not copied: a later in-place update is seen by the program. Only
            those that compiled code cannot read in place (strided; on cuda, not aligned to 16 bytes) are copied, and
            refused where the program writes into them. Tensors of files go to the program's device.
        strict: whether a tensor that the program does not use is an error. By default it is for files and mappings,
            where it may be a misspelt or outdated name, and is not for a module, which may hold more than the part
            that was built.

        Of tied weights any one name is enough. Non-persistent buffers travel with the program: those of a module are
        not bound, but must have the same values.

        Raises:
            WeightError: missing or superfluous names, wrong shapes, dtypes or devices; a weight that the program writes
                into and that overlaps another; a non-persistent buffer of a module with other values than at the build.
                Nothing is bound then.
        """
        opened = weights.open_source(source, self.device)
        unused = self.manifest.unused_weights
        bound = weights.collect(self.manifest.weights, opened, self.device, strict, unused)
        if isinstance(source, nn.Module):
            weights.check_constants(source, self.manifest.constants, self._constants)
        with self._alone():
            self._weights = bound
            self._ready()
        return self

    def bind_inputs(self, tensors: Mapping[str, torch.Tensor]) -> Program:
        """Hand over the inputs that model.yaml declares with `bound: true` (key/value caches), by name; returns the
        program. They are used as they are, and are no arguments of a call from then on. May be called again.

        Raises:
            InputError: missing or superfluous names, wrong shapes, dtypes, devices or layouts; nothing is bound then.
        """
        sizes = check_bound(self.manifest.inputs, self.ranges, tensors, self.device)
        with self._alone():
            self._bound = sizes
            self._inputs = {name: plain(name, tensor) for name, tensor in tensors.items()}
            self._ready()
        return self

    def capture(
        self, mode: str | None = None, sizes: Iterable[int | Mapping[str, int]] | None = None, *, copy: bool = False,
        lazy: bool = False, memory_limit: int | None = None,
    ) -> list[Recorded]:  # fmt: skip
        """Record CUDA graphs for sizes; calls of these sizes, and batches padded to them, replay them from then on.

        Binding anew drops the graphs. What was captured is noted in the cache, or beside an artifact elsewhere.

        Args:
            mode: `full`, graphs of whole steps; `piecewise`, of compiled pieces, with the ops between them run as they
                are, for any value of the dimensions that a size leaves free; `full_and_piecewise`, whole steps where
                sizes fix all dimensions and ops can be captured, else pieces; `none` drops the graphs. By default what
                model.yaml says.
            sizes: by default `cudagraph.sizes`, else `compile.sizes`.
            copy: copy results, which otherwise are overwritten by the next call.
            lazy: record nothing now: calls note which sizes they could have used, and `capture_marked` records these.
            memory_limit: bytes that graphs may take: the largest sizes, and what does not fit then, are left out.

        Returns:
            What was captured, in that order, with bytes and seconds. Nothing on the CPU.

        Raises:
            UsageError: no such mode.
            InputError: a size that no program serves, or that leaves a dimension free, where whole steps are wanted.
            RunError: weights or bound inputs are missing, an op cannot be captured, or the program writes into an input
                that is not bound.
        """
        mode = mode or self.cudagraph.mode
        if mode not in (*MODES, "full_and_piecewise", "none"):
            raise UsageError(
                f"capture mode {mode!r}, expected none, piecewise, full or full_and_piecewise", "correct the name"
            )
        if not self._steps:
            self._unbound()
        given = capture_sizes.listed(self.manifest.spec, self.cudagraph, self.ranges, self._bound, sizes, mode)
        chosen = [] if mode == "none" else self._choose(given, mode)
        with self._alone():
            self._graphs = None
            self._serve(self._steps)
            make = partial(self._capture, copy=copy, lazy=lazy, memory_limit=memory_limit)
            try:
                return make(chosen, {})
            except CaptureError as error:
                pieces = self._choose(given, "piecewise") if mode == "full_and_piecewise" else []
                if not pieces:
                    raise
                return make(pieces, {"full": error.message})

    def capture_marked(self) -> list[Recorded]:
        """Record the sizes that calls could have used since `capture(lazy=True)`. For when no request waits."""
        if self._graphs is None:
            return []
        with self._alone():
            before = len(self._graphs.recorded)
            try:
                return self._graphs.record(marked=True)
            finally:
                self._note(self._graphs.recorded[before:])

    @property
    def counters(self) -> Counters:
        """How calls were served since the last capture."""
        return Counters() if self._graphs is None else self._graphs.counters

    @property
    def capture_failures(self) -> dict[Mode, str]:
        """Why there are no graphs of a mode that was asked for, where some op cannot be captured."""
        return {} if self._graphs is None else dict(self._graphs.failures)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While graphs are recorded or dropped, nobody may call."""
        if not self._lock.acquire(blocking=False):
            dispatch.busy()
        try:
            yield
        finally:
            self._lock.release()

    def _choose(self, sizes: Sequence[dict[str, int]], mode: str) -> list[capture_sizes.Chosen]:
        return capture_sizes.choose(self.manifest, self.ranges, self._bound, sizes, mode)

    def _capture(
        self, chosen: Sequence[capture_sizes.Chosen], failures: Mapping[Mode, str], *, copy: bool, lazy: bool,
        memory_limit: int | None,
    ) -> list[Recorded]:  # fmt: skip
        wishes = [Wish(c.mode, c.size, self._factories[c.program], self._steps[c.program], c.fixed) for c in chosen]
        if not wishes or self._recorder is None:
            return []
        weights = dict(zip([w.name for w in self.manifest.weights], self._weights or (), strict=True))
        weights |= dict(zip([c.name for c in self.manifest.constants], self._constants, strict=True))
        graphs = Graphs(
            self.manifest.inputs, self.manifest.results, weights, self._inputs, self._bound or {},
            self._written(weights), wishes, partial(self._recorder, self.device), copy=copy, failures=failures,
            memory_limit=memory_limit,
        )  # fmt: skip
        if not lazy:
            self._note(graphs.record(known=self._noted()))
        self._graphs = graphs
        self._serve([graphs.serving(step) for step in self._steps])
        return graphs.recorded

    def _written(self, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What a capture must leave as it was. Pad rows write into no paged cache, which would be too large to copy."""
        found = [weights[entry.name] for entry in self.manifest.weights if entry.mutated]
        found += [weights[entry.name] for entry in self.manifest.constants if entry.mutated]
        if self.manifest.spec.kv_cache is None:
            found += [self._inputs[entry.name] for entry in self.manifest.inputs if entry.mutated and entry.bound]
        return found

    def _noted(self) -> dict[str, int]:
        """Bytes that sizes took at an earlier capture on such a GPU."""
        plan = None if self._path is None else capture_plan.read(capture_plan.beside(self._path))
        if plan is None or self.device.type != "cuda":
            return {}
        here = (torch.cuda.get_device_name(self.device), str(torch.__version__))
        return plan.bytes if (plan.device, plan.torch) == here else {}

    def _note(self, recorded: Sequence[Recorded]) -> None:
        if self._path is not None and recorded and self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            capture_plan.note(capture_plan.beside(self._path), name, str(torch.__version__), recorded)

    def explain(self, /, *args: Any, **dims: int) -> Explanation:
        """Which program, and after `capture` which graph, serves these values of the dimensions, and why.

        Raises:
            InputError: an unknown or missing dimension, or values that no program serves.
        """
        names = [name for name, _, _ in self.ranges[0].bounds]
        if args:
            shown = ", ".join(f"{name}={value!r}" for name, value in zip(names, args, strict=False))
            raise InputError(
                f"explain takes values by name, expected {', '.join(names) or 'none'}",
                f"write explain({shown})" if shown else "",
            )
        dims = {**(self._bound or {}), **dims}
        for name, value in dims.items():
            if not isinstance(value, SupportsIndex):
                raise InputError(f"{name} is {value!r}, expected a whole number")
            if name not in names:
                near = nearest(name, names)
                hint = f"did you mean {near}?" if near else ""
                raise InputError(f"{name} is not a dimension; the program has {', '.join(names) or 'none'}", hint)
        if missing := [name for name in names if name not in dims]:
            raise InputError(f"no value for the dimension {', '.join(missing)}")
        index = select(self.ranges, dims)
        box = self.ranges[index]
        graph = None if self._graphs is None else self._graphs.choose(dims)
        return Explanation(box.label, box.is_size, self.manifest.programs[index].step, self._why(box, dims), graph)

    def __call__(self, /, *args: Any, **inputs: Any) -> Any:
        """Run the program on inputs by name, or by position in declared order.

        A strided input is copied first (on cuda also one that is not aligned to 16 bytes), unless the program writes
        into it. No gradient is recorded.

        Raises:
            InputError: an input is not as declared; nothing has run then.
            RunError: weights are not bound.
        """
        try:
            return self._call(*args, **inputs)
        except FxcError:
            raise
        except Exception:
            # Possibly a wrong name, rank or layout, which the quick checks trip over: then say so instead.
            refuse(self.manifest.inputs, self.ranges, self.device, args, inputs, self._inputs)
            raise

    def __reduce_ex__(self, protocol: Any, /) -> NoReturn:
        """For `copy` and `pickle`."""
        raise RunError(
            "a loaded program cannot be copied or pickled: it holds compiled code of this process",
            f"load it again instead: fxc.load({self.manifest.hash!r})",
        )

    def __repr__(self) -> str:
        shapes = "; ".join(box.label for box in self.ranges)
        return f"<fxc.Program {self.manifest.model} {self.manifest.hash[:12]} on {self.device}: {shapes}>"

    def _ready(self) -> None:
        """Make the call, once weights and bound inputs are there."""
        if self._weights is None or self._bound is None:
            return
        tensors = (*self._weights, *self._constants)
        made = {factory: factory(tensors) for factory in dict.fromkeys(self._factories)}
        self._steps = [made[factory] for factory in self._factories]
        self._graphs = None
        self._serve(self._steps)

    def _serve(self, steps: Sequence[Callable[..., Any]]) -> None:
        where = (self.manifest.inputs, self.ranges, self.device)
        self.dispatch_code = dispatch.source(*where, self._bound)
        self._call = dispatch.compile_call(self.dispatch_code, *where, steps, self._inputs, self._lock)

    def _unbound(self, /, *args: Any, **inputs: Any) -> NoReturn:
        if self._weights is None:
            what, how = "weights", "program.bind(...)"
            names = [weight.name for weight in self.manifest.weights]
        else:
            what, how = "bound inputs", "program.bind_inputs(...)"
            names = [entry.name for entry in self.manifest.inputs if entry.bound]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise RunError(f"the program has no {what} yet: it needs {shown}", f"call {how} before the first call")

    def _why(self, box: Range, dims: Mapping[str, int]) -> str:
        asked = ", ".join(f"{name} = {dims[name]}" for name, _, _ in box.bounds)
        if not box.bounds:
            return "the program has one static shape"
        if box.free < max(other.free for other in self.ranges) or box.is_size:
            return f"{asked} is one of the compiled sizes"
        sizes = ", ".join(str(size) for size in self.sizes) or "none"
        return f"{asked} is not one of the compiled sizes ({sizes}) and lies in this range"
