"""Binding weights: from files, mappings and modules to one tensor per declared weight, checked before any is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fxc.convert import nearest
from fxc.errors import InputError, WeightError
from fxc.manifest import Constant, Weight
from fxc.runtime.files import FileSource
from fxc.runtime.inputs import ALIGNMENT, apart, layout, plain
from fxc.runtime.parts import assembled

Source = str | Path | Sequence[str | Path] | Mapping[str, torch.Tensor] | nn.Module

SHOWN = 5
"""Problems that an error spells out; the rest are counted."""


class Problem(NamedTuple):
    text: str
    hint: str = ""


class WeightSource(Protocol):
    """Named tensors whose layout can be asked for before they are read."""

    strict: bool
    """Whether a tensor that the program does not use is an error by default."""

    def names(self) -> Iterable[str]: ...

    def layout(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype's name."""

    def memory(self, name: str, weight: Weight, device: torch.device) -> Problem | None:
        """What is wrong with the place or strides of a tensor."""

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        """The tensor itself, contiguous and on `device`."""


class TensorSource:
    """Tensors that are in memory: used as they are, so that a later in-place update is seen by the program. Only what
    compiled code cannot read in place, a strided or (cuda) misaligned one, is copied at bind."""

    def __init__(self, tensors: Mapping[str, Any], strict: bool) -> None:
        self.strict = strict
        self._tensors: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            try:
                self._tensors[name] = plain(name, value)
            except InputError as error:
                raise WeightError(error.message.replace("input", "weight", 1), error.hint) from None

    def names(self) -> Iterable[str]:
        return self._tensors

    def layout(self, name: str) -> tuple[tuple[int, ...], str]:
        tensor = self._tensors[name]
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def memory(self, name: str, weight: Weight, device: torch.device) -> Problem | None:
        tensor = self._tensors[name]
        if tensor.device != device:
            return Problem(f"weight {name} is on {tensor.device}, expected {device}", f"move it: .to({str(device)!r})")
        if tensor.layout != torch.strided:
            return Problem(f"weight {name} has layout {tensor.layout}, expected torch.strided")
        if weight.mutated and not _readable(tensor):
            return Problem(
                f"weight {name} has stride {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, expected a "
                "contiguous, aligned tensor because the program writes into it"
            )
        return None

    def shared(self, weights: Sequence[Weight], device: torch.device) -> Iterator[Problem]:
        """Weights that the program writes into, each with another one that is in the same memory."""
        found: list[tuple[Weight, str, torch.Tensor]] = []
        for weight in weights:
            for name in _names(weight):
                tensor = self._tensors.get(name)
                if tensor is not None and tensor.device == device:
                    found.append((weight, name, tensor))
        written = [entry for entry in found if entry[0].mutated]
        if not written or apart([entry[2] for entry in written], [e[2] for e in found if not e[0].mutated]):
            return
        for weight, name, tensor in written:
            for other, twin_name, twin in found:
                if other.name != weight.name and not apart((tensor,), (twin,)):
                    yield Problem(
                        f"weight {name}, which the program writes into, overlaps in memory with weight {twin_name}",
                        "bind a copy of one of them",
                    )

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor if _readable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _readable(tensor: torch.Tensor) -> bool:
    aligned = not tensor.is_cuda or tensor.data_ptr() % ALIGNMENT == 0
    return tensor.is_contiguous() and aligned and not tensor.is_conj() and not tensor.is_neg()


def open_source(source: Source, device: torch.device) -> WeightSource:
    """The right reader for whatever was handed to `Program.bind`."""
    if isinstance(source, nn.Module):
        named: dict[str, torch.Tensor] = dict(source.named_parameters(remove_duplicate=False))
        named.update(source.named_buffers(remove_duplicate=False))
        return TensorSource(named, strict=False)
    if isinstance(source, Mapping):
        return TensorSource(source, strict=True)
    if isinstance(source, (str, Path)):
        return FileSource([Path(source)], device)
    if isinstance(source, Sequence) and all(isinstance(path, (str, Path)) for path in source):
        return FileSource([Path(path) for path in source], device)
    raise WeightError(
        f"cannot bind {type(source).__name__}, expected a .safetensors path or paths, a mapping of name to tensor, or "
        "an nn.Module"
    )


def collect(
    weights: Sequence[Weight],
    source: WeightSource,
    device: torch.device,
    strict: bool | None = None,
    unused: Iterable[str] = (),
) -> list[torch.Tensor]:
    """One tensor per weight, in order.

    unused: names of what the model has and the program does not read, which are never superfluous.

    Raises:
        WeightError: all that is wrong, before anything is read; the first few problems in words.
    """
    shared = source.shared(weights, device) if isinstance(source, TensorSource) else ()
    source = assembled(source, weights)
    given = list(source.names())
    present = set(given)
    problems: list[Problem] = []
    chosen: list[list[str]] = []
    used: set[str] = set(unused)
    for weight in weights:
        found = [name for name in (weight.name, *weight.aliases) if name in present]
        chosen.append(found)
        used.update(found)
    for weight, found in zip(weights, chosen, strict=True):
        if not found:
            problems.append(_missing(weight, [name for name in given if name not in used]))
        for name in found:
            problems += _problems(name, weight, source, device)
    if source.strict if strict is None else strict:
        wanted = [name for weight, found in zip(weights, chosen, strict=True) if not found for name in _names(weight)]
        problems += [_superfluous(name, wanted) for name in given if name not in used]
    problems += shared
    if problems:
        raise _error(problems)
    return [_read(weight, found, source, device) for weight, found in zip(weights, chosen, strict=True)]


def check_constants(module: nn.Module, constants: Sequence[Constant], values: Sequence[torch.Tensor]) -> None:
    """That the buffers of `module` whose values travel with the program still have these values.

    Raises:
        WeightError: one differs, beyond what another machine or library may round otherwise.
    """
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for constant, value in zip(constants, values, strict=True):
        buffer = buffers.get(constant.name)
        if buffer is None or buffer.is_meta or constant.mutated:
            continue
        if (buffer.shape, buffer.dtype) == (value.shape, value.dtype) and not _close(buffer.detach(), value):
            raise WeightError(
                f"buffer {constant.name} of the module has other values than when the program was built, which has its "
                "own: it is not persistent",
                "build the model again as it is now; or register the buffer as persistent, to bind it as a weight",
            )


def _close(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    tensor = tensor.to(value.device)
    if not (value.is_floating_point() or value.is_complex()):
        return torch.equal(tensor, value)
    rtol = max(1e-3, 2 * torch.finfo(value.dtype).eps)
    if value.is_floating_point():
        tensor, value = tensor.float(), value.float()  # float8 has no comparison
    return torch.allclose(tensor, value, rtol=rtol, atol=1e-5, equal_nan=True)


def _names(weight: Weight) -> tuple[str, ...]:
    return (weight.name, *weight.aliases)


def _missing(weight: Weight, spare: Sequence[str]) -> Problem:
    also = f" (or {', '.join(weight.aliases)})" if weight.aliases else ""
    near = nearest(weight.name, spare)
    return Problem(
        f"weight {weight.name}{also} is missing, expected {layout(weight.shape, weight.dtype)}",
        f"the nearest name that came is {near}" if near else "",
    )


def _superfluous(name: str, wanted: Sequence[str]) -> Problem:
    near = nearest(name, wanted)
    hint = f"did you mean {near}?" if near else "bind(..., strict=False) ignores tensors that the program does not use"
    return Problem(f"{name} is not a weight of the program", hint)


def _problems(name: str, weight: Weight, source: WeightSource, device: torch.device) -> list[Problem]:
    shape, dtype = source.layout(name)
    found = []
    if shape != weight.shape or dtype != weight.dtype:
        hint = f"cast it first: tensor.to(torch.{weight.dtype}), and bind the mapping" if shape == weight.shape else ""
        came, expected = layout(shape, dtype), layout(weight.shape, weight.dtype)
        found.append(Problem(f"weight {name} is {came}, expected {expected}", hint))
    if problem := source.memory(name, weight, device):
        found.append(problem)
    return found


def _error(problems: Sequence[Problem]) -> WeightError:
    hint = next((problem.hint for problem in problems if problem.hint), "")
    if len(problems) == 1:
        return WeightError(problems[0].text, hint)
    shown = "; ".join(problem.text for problem in problems[:SHOWN])
    rest = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return WeightError(f"{len(problems)} problems with the weights: {shown}{rest}", hint)


def _read(weight: Weight, found: Sequence[str], source: WeightSource, device: torch.device) -> torch.Tensor:
    """The tensor under the first of its names; the others must hold the same values."""
    tensor = source.tensor(found[0], device)
    for other in found[1:]:
        twin = source.tensor(other, device)
        same = twin.data_ptr() == tensor.data_ptr() and twin.stride() == tensor.stride()
        if not same and not torch.equal(_bits(twin), _bits(tensor)):
            raise WeightError(
                f"weights {found[0]} and {other} differ, expected equal ones: the model ties them",
                "bind the tensor under one of the names only",
            )
    return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: equal for equal NaNs, and for dtypes that have no comparison."""
    return tensor.reshape(-1).view(torch.uint8)
