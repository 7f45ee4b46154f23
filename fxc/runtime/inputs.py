"""The checks of a call, in full and with words. `dispatch` generates the quick form; this one says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NoReturn

import torch

from fxc.convert import nearest
from fxc.errors import InputError, RunError
from fxc.manifest import Input
from fxc.shapes import Range, out_of_bounds, parse_size, select, size_at

ALIGNMENT = 16
"""Bytes. Compiled CUDA kernels load vectors of this width."""


def layout(shape: Sequence[int | str], dtype: str | torch.dtype) -> str:
    """`float32[8, num_tokens]`."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(str(n) for n in shape)}]"


def plain(name: str, value: Any) -> torch.Tensor:
    """A Parameter or another harmless subclass as a plain tensor that shares its memory.

    Raises:
        InputError: not a tensor, a sparse or nested one, or a subclass that keeps its data elsewhere (DTensor, fake).
    """
    if not isinstance(value, torch.Tensor):
        raise InputError(f"input {name} is {_describe(value)}, expected a torch.Tensor")
    if value.is_nested:
        raise InputError(
            f"input {name} is a nested tensor, expected a torch.Tensor of one shape",
            "pad it: torch.nested.to_padded_tensor(tensor, padding)",
        )
    if value.layout != torch.strided:
        raise InputError(f"input {name} has layout {value.layout}, expected torch.strided")
    kind = type(value)
    if kind is torch.Tensor:
        return value
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InputError(
            f"input {name} is a {kind.__name__}, whose memory a compiled program cannot read; expected a torch.Tensor"
        )
    return value.detach().as_subclass(torch.Tensor)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, aligned as a new tensor is; kept apart from the original, which may be an output."""
    return tensor.clone(memory_format=torch.contiguous_format)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of its first byte and of the one after its last; equal where it has no elements."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def apart(written: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> bool:
    """Whether no tensor of `written` overlaps another tensor of either in memory."""
    spans = [(*extent(tensor), True) for tensor in written] + [(*extent(tensor), False) for tensor in read]
    spans.sort()
    end = end_written = 0
    for start, stop, writes in spans:
        if start < stop:
            if start < (end if writes else end_written):
                return False
            end = max(end, stop)
            if writes:
                end_written = max(end_written, stop)
    return True


def named(inputs: Sequence[Input], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, in declared order.

    Raises:
        InputError: missing, superfluous, or given twice.
    """
    names = [entry.name for entry in inputs]
    if len(args) > len(names):
        raise InputError(f"{len(args)} positional inputs, expected at most {len(names)}: {', '.join(names)}")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name in given:
            raise InputError(f"input {name} is given twice, by position and by name")
        if name not in names:
            near = nearest(name, names)
            raise InputError(
                f"{name} is not an input; the program takes {', '.join(names) or 'none'}",
                f"did you mean {near}?" if near else "",
            )
        given[name] = value
    if missing := [layout(entry.shape, entry.dtype) for entry in inputs if entry.name not in given]:
        absent = [name for name in names if name not in given]
        shown = ", ".join(f"{name}, expected {text}" for name, text in zip(absent, missing, strict=True))
        raise InputError(f"input {shown}: missing")
    return {name: given[name] for name in names}


def check(inputs: Sequence[Input], values: Mapping[str, Any], device: torch.device) -> dict[str, int]:
    """The value of each dimension.

    Raises:
        InputError: the first thing that is not as declared.
    """
    dims: dict[str, int] = {}
    first: dict[str, str] = {}
    tensors: list[tuple[Input, torch.Tensor]] = []
    for entry in inputs:
        tensor = plain(entry.name, values[entry.name])
        _check_kind(entry, tensor, device)
        if tensor.dim() != len(entry.shape):
            raise InputError(
                f"input {entry.name} has {tensor.dim()} dimensions, {layout(tensor.shape, tensor.dtype)}, "
                f"expected {len(entry.shape)}, {layout(entry.shape, entry.dtype)}"
            )
        for axis, (size, declared) in enumerate(zip(tensor.shape, entry.shape, strict=True)):
            name, more = parse_size(declared)
            if name and name not in dims:
                dims[name] = size - more
                first[name] = entry.name
            expected = size_at(declared, dims)
            if size != expected:
                why = f", the {declared} of input {first[name]}" if name else ""
                raise InputError(f"input {entry.name} has size {size} in dimension {axis}, expected {expected}{why}")
        if entry.mutated:
            _check_memory(entry, tensor)
        tensors.append((entry, tensor))
    _check_apart(tensors, values)
    return dims


def _check_apart(tensors: Iterable[tuple[Input, torch.Tensor]], values: Mapping[str, Any]) -> None:
    """What the program writes into one input must not show in another: compiled code takes them for separate."""
    for (entry, tensor), (other, twin) in combinations(tensors, 2):
        if not (entry.mutated or other.mutated):
            continue
        if apart((tensor,), (twin,)):
            continue
        written, name = (entry.name, other.name) if entry.mutated else (other.name, entry.name)
        how = "is the same tensor as" if values[name] is values[written] else "overlaps in memory with"
        raise InputError(f"input {name} {how} input {written}, which the program writes into", "pass a copy of it")


def _check_kind(entry: Input, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.dtype != getattr(torch, entry.dtype):
        raise InputError(
            f"input {entry.name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected {entry.dtype}",
            f"cast it: {entry.name}.to(torch.{entry.dtype})",
        )
    if tensor.device != device:
        raise InputError(
            f"input {entry.name} is on {tensor.device}, expected {device}", f"move it: {entry.name}.to({str(device)!r})"
        )


def _check_memory(entry: Input, tensor: torch.Tensor) -> None:
    """A mutated or bound input cannot be copied first: one side would not see what the other one writes."""
    if not tensor.is_contiguous():
        raise InputError(
            f"input {entry.name} has stride {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, expected a "
            f"contiguous tensor because {_why(entry)}"
        )
    if tensor.is_cuda and tensor.data_ptr() % ALIGNMENT:
        off = tensor.data_ptr() % ALIGNMENT
        raise InputError(
            f"input {entry.name} begins {off} bytes after a multiple of {ALIGNMENT}, expected "
            f"an aligned tensor because {_why(entry)}"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InputError(f"input {entry.name} is a lazy conjugate or negation, expected a tensor that can be written")


def _why(entry: Input) -> str:
    return "the program writes into it" if entry.mutated else "it is bound"


def refuse(
    inputs: Sequence[Input],
    ranges: Sequence[Range],
    device: torch.device,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    bound: Mapping[str, torch.Tensor],
) -> None:
    """Raise the InputError of a call whose quick check failed; return where the inputs are not at fault."""
    given = named([entry for entry in inputs if not entry.bound], args, kwargs)
    dims = check(inputs, {**bound, **given}, device)
    select(ranges, {name: dims[name] for name, _, _ in ranges[0].bounds})


def must_refuse(
    inputs: Sequence[Input],
    ranges: Sequence[Range],
    device: torch.device,
    values: Sequence[Any],
    bound: Mapping[str, torch.Tensor],
) -> NoReturn:
    """The same where the quick check saw a fault: it and this must agree."""
    refuse(inputs, ranges, device, values, {}, bound)
    raise RunError("the quick check of the inputs refused a call that the full check accepts; this is a fault of fxc")


def check_bound(
    inputs: Sequence[Input], ranges: Sequence[Range], tensors: Mapping[str, Any], device: torch.device
) -> dict[str, int]:
    """The values of the dimensions that the bound inputs have.

    Raises:
        InputError: missing, superfluous, or not as declared.
    """
    entries = [entry for entry in inputs if entry.bound]
    given = named(entries, (), tensors)
    dims = check(entries, given, device)
    for entry in entries:
        _check_memory(entry, given[entry.name])
    if not any(all(low <= dims.get(name, low) <= high for name, low, high in box.bounds) for box in ranges):
        raise out_of_bounds(ranges, dims)
    return dims


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
