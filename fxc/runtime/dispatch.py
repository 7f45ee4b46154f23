"""Generates the function that checks a call's inputs and picks its program: about half a microsecond per input.

For `input_ids: int64[num_tokens]` and `positions: int64[num_tokens]`, sizes 1 and 8, on cpu it is

    def call(input_ids, positions):
        if _type(input_ids) is not _Tensor:
            input_ids = _plain('input_ids', input_ids)
        if _type(positions) is not _Tensor:
            positions = _plain('positions', positions)
        (num_tokens,) = input_ids.shape
        if not (
            input_ids.dtype is _int64 and input_ids.is_cpu
            and positions.dtype is _int64 and positions.is_cpu and positions.shape == (num_tokens,)
        ):
            _refuse((input_ids, positions))
        if not input_ids.is_contiguous():
            input_ids = _contiguous(input_ids)
        ...
        _step = _sizes_0.get(num_tokens)  # num_tokens=1; num_tokens=8
        if _step is None:
            if 1 <= num_tokens <= 8192:
                _step = _step_2
            else:
                _refuse((input_ids, positions))
        ...

A shape of the wrong rank fails to unpack, a sparse tensor fails `is_contiguous`, a wrong name fails the call itself:
`Program.__call__` asks `inputs.refuse` for the words of any such error.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, NoReturn, TypeVar

import torch

from fxc import _torch_run
from fxc.errors import DamagedError, RunError
from fxc.manifest import Input
from fxc.runtime import inputs as full
from fxc.runtime.step import Step
from fxc.shapes import Range, dims_of, parse_size, whole

T = TypeVar("T")


def source(
    inputs: Sequence[Input], ranges: Sequence[Range], device: torch.device, bound: Mapping[str, int] | None = None
) -> str:
    """The text of `call`. Helpers begin with an underscore more than any input or dimension does.

    bound: values of the dimensions that bound inputs have; those inputs are no arguments of the call.
    """
    writer = _Writer(inputs, ranges, device, bound or {})
    return "\n".join(writer.lines()) + "\n"


def compile_call(
    text: str, inputs: Sequence[Input], ranges: Sequence[Range], device: torch.device, steps: Sequence[Step],
    bound: Mapping[str, torch.Tensor] | None = None, lock: Lock | None = None,
) -> Step:  # fmt: skip
    """Make `call` of its text, one step per range, and the bound inputs by name.

    lock: held by the thread that is in the program, on cuda.
    """
    lock = lock or Lock()
    under = _underscores(inputs, ranges)
    names: dict[str, Any] = {
        "type": type,
        "Tensor": torch.Tensor,
        "plain": full.plain,
        "contiguous": full.contiguous,
        "apart": full.apart,
        "refuse": lambda values: full.must_refuse(inputs, ranges, device, values, bound or {}),
        **{f"bound_{name}": tensor for name, tensor in (bound or {}).items()},
        "enter": lock.acquire,
        "leave": lock.release,
        "busy": busy,
        "grad_enabled": torch.is_grad_enabled,
        "set_grad": _torch_run.grad_switch(),
        "autocast": torch.is_autocast_enabled,
        "plainly": partial(_plainly, device.type),
        **{f"sizes_{number}": table for number, (_, table) in enumerate(_size_tables(ranges, steps))},
        **{entry.dtype: getattr(torch, entry.dtype) for entry in inputs},
        **{f"step_{index}": step for index, step in enumerate(steps)},
    }
    namespace = {under + name: value for name, value in names.items()}
    exec(compile(text, "<fxc dispatch>", "exec"), namespace)
    call: Step = namespace.pop("call")  # else a cycle, which would keep graphs that were dropped
    return call


def _underscores(inputs: Sequence[Input], ranges: Sequence[Range]) -> str:
    names = [entry.name for entry in inputs] + [name for name, _, _ in ranges[0].bounds]
    return "_" * (1 + max((len(name) - len(name.lstrip("_")) for name in names), default=0))


def busy() -> NoReturn:
    """For a thread that calls while another one does."""
    raise RunError(
        "another thread is in this program: what they write would be mixed up",
        "call it from one thread at a time, or load it once for each",
    )


def _plainly(kind: str, step: Step, *values: torch.Tensor) -> Any:
    """Run a step inside a caller's `torch.autocast`, which would cast some calls of compiled code and not others."""
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        return step(*values)


def _size_tables(ranges: Sequence[Range], steps: Sequence[T]) -> list[tuple[tuple[str, ...], dict[Any, T]]]:
    """Steps of sizes by the value of the dimension that they fix, or by the values of several: a table for each set of
    dimensions, those with most of them first.

    As long as that is what `shapes.select` does: sizes that fix as many other dimensions, or that do not serve all
    values of the dimensions that they leave free, have to be looked at one by one, and so has all that comes after.
    """
    bounds = whole(ranges)
    levels: dict[int, dict[tuple[str, ...], dict[Any, T]]] = {}
    mixed = set()
    for box, step in zip(ranges, steps, strict=True):
        fixed = tuple((name, low) for name, low, high in box.bounds if low == high)
        if any(low < high and bounds[name] != (low, high) for name, low, high in box.bounds):
            mixed.add(box.free)
        names, values = tuple(name for name, _ in fixed), tuple(value for _, value in fixed)
        table = levels.setdefault(box.free, {}).setdefault(names, {})
        table.setdefault(values if len(values) > 1 else values[0] if values else None, step)
    tables = []
    for free, found in sorted(levels.items()):
        ((names, table), *others) = found.items()
        if others or free in mixed or not names:
            break
        tables.append((names, table))
    return tables


class _Writer:
    def __init__(
        self, inputs: Sequence[Input], ranges: Sequence[Range], device: torch.device, bound: Mapping[str, int]
    ) -> None:
        self.all = inputs
        self.inputs = [entry for entry in inputs if not entry.bound]
        self.bound = bound
        self.ranges = ranges
        self.device = device
        self.under = _underscores(inputs, ranges)
        self.known: set[str] = set(bound)
        """Dimensions whose value is known by now."""

    def lines(self) -> Iterator[str]:
        names = ", ".join(entry.name for entry in self.inputs)
        yield f"def call({names}):"
        yield from self._indent(1, self._body())

    def _body(self) -> Iterator[str]:
        u = self.under
        for entry in self.inputs:
            yield f"if {u}type({entry.name}) is not {u}Tensor:"
            yield f"    {entry.name} = {u}plain({entry.name!r}, {entry.name})"
        conditions: list[str] = []
        for entry in self.inputs:
            unpack, checks = self._check(entry)
            if unpack:
                yield unpack
            conditions.append(" and ".join(checks))
        written = [entry.name for entry in self.inputs if entry.mutated]
        if written and len(self.inputs) > 1:
            read = [entry.name for entry in self.inputs if not entry.mutated]
            conditions.append(f"{u}apart({self._tuple(written)}, {self._tuple(read)})")
        if conditions:
            yield "if not ("
            yield from (f"    {'and ' if index else ''}{text}" for index, text in enumerate(conditions))
            yield "):"
            yield f"    {self._refuse()}"
        for entry in self.inputs:
            if not entry.mutated:
                fit = self._fit(entry)
                yield f"if not {fit[0]}:" if len(fit) == 1 else f"if not ({' and '.join(fit)}):"
                yield f"    {entry.name} = {u}contiguous({entry.name})"
        yield from self._pick()
        if self.device.type == "cpu":
            yield from self._run()
            return
        yield f"if not {u}enter(False):"
        yield f"    {u}busy()"
        yield "try:"
        yield from self._indent(1, self._run())
        yield "finally:"
        yield f"    {u}leave()"

    def _check(self, entry: Input) -> tuple[str, list[str]]:
        """The line that takes the shape of an input apart, if it brings new dimensions, and its conditions."""
        name, u = entry.name, self.under
        checks = [f"{name}.dtype is {u}{entry.dtype}"]
        checks.append(f"{name}.is_cpu" if self.device.type == "cpu" else f"{name}.get_device() == {self.device.index}")
        unpack = ""
        if set(dims_of(entry.shape)) <= self.known:
            checks.append(f"{name}.shape == {self._tuple([self._value(part) for part in entry.shape])}")
        else:
            targets: list[str] = []
            for axis, part in enumerate(entry.shape):
                if isinstance(part, str) and parse_size(part)[1] == 0 and part not in self.known:
                    self.known.add(part)
                    targets.append(self._value(part))
                else:
                    targets.append(f"{u}{axis}_{name}")
                    checks.append(f"{u}{axis}_{name} == {self._value(part)}")
            unpack = f"{self._tuple(targets)} = {name}.shape"
        if entry.mutated:
            checks += self._fit(entry)
        return unpack, checks

    def _fit(self, entry: Input) -> list[str]:
        """When the memory of an input is as compiled code reads it."""
        conditions = [f"{entry.name}.is_contiguous()"]
        if self.device.type == "cuda":
            conditions.append(f"{entry.name}.data_ptr() % {full.ALIGNMENT} == 0")
        if entry.dtype.startswith("complex"):
            conditions.append(f"not {entry.name}.is_conj()")
        if entry.dtype.startswith(("complex", "float", "bfloat")):  # `x.conj().imag` is negated when it is read
            conditions.append(f"not {entry.name}.is_neg()")
        return conditions

    def _pick(self) -> Iterator[str]:
        """Choose the step as `shapes.select` does: the exact size, else the first range."""
        u = self.under
        dims = [name for name, _, _ in self.ranges[0].bounds]
        if missing := [name for name in dims if name not in self.known]:
            raise DamagedError(f"manifest.json: no input has the dimension {missing[0]}, which programs are picked by")
        if not dims:
            yield f"{u}step = {u}step_0"
            return
        tables = _size_tables(self.ranges, self.ranges)
        listed = {box for _, table in tables for box in table.values()}
        rest = [(index, box) for index, box in enumerate(self.ranges) if box not in listed]
        rest.sort(key=lambda entry: entry[1].free)
        for depth, (names, table) in enumerate(tables):
            values = [self._value(name) for name in names]
            key = values[0] if len(values) == 1 else self._tuple(values)
            shown = "; ".join(box.label for box in table.values())
            others = [
                f"not {low} <= {self._value(name)} <= {high}"
                for name, (low, high) in whole(self.ranges).items()
                if name not in names
            ]
            test = " or ".join([f"{u}step is None", *others])
            lines = [f"{u}step = {u}sizes_{depth}.get({key})  # {shown}", f"if {test}:"]
            yield from self._indent(depth, iter(lines))
        yield from self._indent(len(tables), self._pick_range(rest))

    def _pick_range(self, general: Sequence[tuple[int, Range]]) -> Iterator[str]:
        if not general:
            yield self._refuse()
            return
        for position, (index, box) in enumerate(general):
            test = " and ".join(f"{low} <= {self._value(name)} <= {high}" for name, low, high in box.bounds)
            yield f"{'elif' if position else 'if'} {test}:"
            yield f"    {self.under}step = {self.under}step_{index}"
        yield "else:"
        yield f"    {self._refuse()}"

    def _run(self) -> Iterator[str]:
        """Call the step as it was compiled and proved: nothing recorded, nothing cast. A server that has no_grad on
        already pays less."""
        u = self.under
        values = ", ".join(f"{u}bound_{entry.name}" if entry.bound else entry.name for entry in self.all)
        call = f"return {u}step({values})"
        yield f"if {u}autocast({self.device.type!r}):"
        yield f"    return {u}plainly({', '.join(part for part in (u + 'step', values) if part)})"
        yield f"if {u}grad_enabled():"
        yield f"    {u}set_grad(False)"
        yield "    try:"
        yield f"        {call}"
        yield "    finally:"
        yield f"        {u}set_grad(True)"
        yield call

    def _value(self, part: int | str) -> str:
        dim, more = parse_size(part)
        if not dim or dim in self.bound:
            return str(self.bound.get(dim, 0) + more)
        taken = keyword.iskeyword(dim) or any(entry.name == dim for entry in self.inputs)
        name = f"{self.under}n_{dim}" if taken else dim
        return f"{name} + {more}" if more > 0 else f"{name} - {-more}" if more else name

    def _refuse(self) -> str:
        return f"{self.under}refuse({self._tuple([entry.name for entry in self.inputs])})"

    @staticmethod
    def _tuple(parts: Sequence[str]) -> str:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    @staticmethod
    def _indent(levels: int, lines: Iterator[str]) -> Iterator[str]:
        return (f"{'    ' * levels}{line}" for line in lines)
