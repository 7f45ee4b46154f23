"""A model to a graph: the ways of exporting it, tried in order."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxc import _torch_build as private
from fxc.errors import TraceError
from fxc.guards import failed_guards
from fxc.random_inputs import example_inputs
from fxc.shapes import Range, parse_size
from fxc.spec import InputSpec
from fxc.traced import Traced, normalise

_PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 31, 29, 23, 19, 17, 13, 11, 7, 5, 3)


class Narrowed(Exception):  # noqa: N818  not an error: the rest is traced apart
    """Export holds for a part of the range only: what it said, and the part."""

    def __init__(self, part: Range, message: str) -> None:
        super().__init__(message)
        self.part = part
        self.message = message


def hints(box: Range, avoid: set[int]) -> dict[str, int]:
    """An example value per dimension: not 0 or 1, no end of its range, no width of the model, no two alike."""
    chosen: dict[str, int] = {}
    for name, low, high in box.bounds:
        if low == high:
            chosen[name] = low
            continue
        inner = [p for p in _PRIMES if low < p < high and p not in chosen.values()]
        inner += [value for value in range(max(low, 2), min(high, low + 4096) + 1) if value not in chosen.values()]
        free = [value for value in inner if value not in avoid]
        chosen[name] = (free or inner or [high])[0]
    return chosen


def with_fake_weights(model: nn.Module, device: str) -> nn.Module:
    """Replace, in place, parameters and meta buffers by fake tensors on `device`; other buffers move there. All of them
    contiguous.

    Tied parameters stay tied. Nothing is allocated for a parameter.
    """
    mode = private.fake_mode()
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:  # contiguous, as binding makes every weight
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            fakes[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        return fakes[id(tensor)]

    for module in model.modules():
        parameters, buffers = private.parameters(module), private.buffers(module)
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = fake(parameter)  # type: ignore[assignment]
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = fake(buffer) if buffer.is_meta else private.on_device(buffer.contiguous(), device)
    return model


_WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("non-strict", {"strict": False}),
    ("non-strict, deferred asserts", {"strict": False, "prefer_deferred_runtime_asserts_over_guards": True}),
    ("strict, deferred asserts", {"strict": True, "prefer_deferred_runtime_asserts_over_guards": True}),
)


def capture(model: nn.Module, inputs: Mapping[str, InputSpec], box: Range, device: str) -> Traced:
    """Trace `model`, whose weights are fake, for the shapes in `box`.

    Raises:
        Narrowed: the trace holds for a part of `box` only.
        TraceError: no way of exporting works; names the construct and its line.
    """
    widths = {size for parameter in model.parameters() for size in parameter.shape}
    sizes = hints(box, widths | {part for spec in inputs.values() for part in spec.shape if isinstance(part, int)})
    drawn = example_inputs(inputs, sizes, "cpu", torch.Generator().manual_seed(0))
    example = {name: private.on_device(tensor, device) for name, tensor in drawn.items()}
    dims = {name: torch.export.Dim(name, min=low, max=high) for name, low, high in box.bounds if low < high}
    _check_named(model, inputs)
    dynamic = {name: _dynamic(spec.shape, dims) for name, spec in inputs.items()}
    failures: list[tuple[str, Exception]] = []
    narrowed: Narrowed | None = None
    for how, options in _WAYS:
        try:
            with torch.no_grad():
                exported = torch.export.export(model, (), example, dynamic_shapes=dynamic, **options)
            return normalise(exported, inputs, box, model)
        except Exception as error:
            failures.append((how, error))
            found = _narrowed(error, box, sizes)
            if narrowed is None or (found and _is_point(narrowed.part, box)):
                narrowed = found
            if narrowed and how != "non-strict" and not _is_point(narrowed.part, box):
                raise narrowed from None
    if narrowed:
        raise narrowed
    raise _explain(failures, model)


def _dynamic(shape: Iterable[int | str], dims: Mapping[str, Any]) -> dict[int, Any]:
    """Which sizes of an input are dynamic, as torch.export takes it."""
    parts = list(enumerate(map(parse_size, shape)))
    return {axis: dims[name] + more if more else dims[name] for axis, (name, more) in parts if name in dims}


def _is_point(part: Range, box: Range) -> bool:
    """Whether a dimension came down to its example value: often the way of exporting, not the model, needs that."""
    return any(
        low < high and part_low == part_high
        for (_, low, high), (_, part_low, part_high) in zip(box.bounds, part.bounds, strict=True)
    )


def _check_named(model: nn.Module, inputs: Iterable[str]) -> None:
    """torch.export cannot give a dynamic shape to what `**kwargs` takes."""
    for name in inputs:
        if name not in inspect.signature(model.forward).parameters:
            raise TraceError(
                f"forward of {type(model).__name__} takes input {name} in its **kwargs", "name it as an argument"
            )


_SUGGESTED = re.compile(r"^\s+(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", re.MULTILINE)
_GUARDED = re.compile(r"values of (\w+) = .* guard (?:(\d+) <= L\S+)?(?: and )?(?:L\S+ <= (\d+))?$", re.MULTILINE)


def _narrowed(error: Exception, box: Range, sizes: Mapping[str, int]) -> Narrowed | None:
    """The part of `box` that export says it can do, from its 'Suggested fixes' and the guards it lists."""
    part = box
    bounds = {name: (low, high) for name, low, high in box.bounds}
    for name, low, high in [*_SUGGESTED.findall(str(error)), *_GUARDED.findall(str(error))]:
        if name in bounds:
            part = part.replace(name, int(low or bounds[name][0]), int(high or bounds[name][1]))
    if part == box or not part.contains(sizes):
        return None
    return Narrowed(part, _first_line(error) + _branch(error))


def _branch(error: BaseException) -> str:
    """Where the model asks about a size, for an error about the answers."""
    places = [place for place in failed_guards(error) if not private.is_own_file(place)]
    if not places:
        return ""
    file, _, line = places[-1].rpartition(":")
    return f" at {file}:{line}: {linecache.getline(file, int(line)).strip()}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    details = [line for line in lines if line.startswith("- ")]
    text = (details or lines or [type(error).__name__])[-1 if details else 0].removeprefix("- ")
    for name, source in re.findall(r"values of (\w+) = (L\[\S+)", text):
        text = text.replace(f"{name} = {source}", name).replace(source, name)
    return text


_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')


def _explain(failures: Sequence[tuple[str, Exception]], model: nn.Module) -> TraceError:
    """One message for all failed ways: the construct, and the innermost line of source outside torch."""
    error = failures[0][1]
    place = ""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    text = "\n".join(str(failure) for _, failure in failures)
    frames += [(file, int(line)) for file, line, _ in _LINE.findall(text)]
    own = [(file, line) for file, line in frames if not private.is_own_file(file)]
    if own:
        file, line = own[-1]
        place = f" at {file}:{line}: {linecache.getline(file, line).strip()}"
    place = _branch(error) or place
    message = f"{type(model).__name__} cannot be traced: {_first_line(error)}{place}"
    others = {_first_line(failure) for _, failure in failures[1:]} - {_first_line(error)}
    hint = "tried " + "; ".join(how for how, _ in failures)
    if others:
        hint += ". Also: " + "; ".join(sorted(others))
    return TraceError(message, hint)


def source_files(graph: fx.Graph) -> set[str]:
    """Source files, torch's own left out, that lines of the graph come from."""
    files = {file for node in graph.nodes for file, _, _ in _LINE.findall(node.meta.get("stack_trace") or "")}
    return {file for file in files if not private.is_own_file(file)}


def model_files(model: nn.Module) -> set[str]:
    """Source files of the classes of all submodules, torch's own left out."""
    files = set()
    for module in model.modules():
        for cls in type(module).__mro__:
            try:
                file = inspect.getsourcefile(cls)
            except TypeError:
                continue
            if file and not private.is_own_file(file):
                files.add(file)
    return files
