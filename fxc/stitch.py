"""Pieces to transformed_code.py: straight-line Python, one call per piece. Pure."""

from __future__ import annotations

import builtins
import dataclasses
import keyword
import operator
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxc._torch_build import schema
from fxc.errors import TraceError
from fxc.graph_text import parse_layout, target_text, value_text
from fxc.partition import Eager, Partition
from fxc.region import Call
from fxc.scalars import NAMES, WORD, is_scalar

_RESERVED = {
    *keyword.kwlist,
    *dir(builtins),
    "torch",
    "math",
    "operator",
    "collections",
    "pieces",
    "weights",
    "empty",
    "step",
    "WEIGHTS",
    "PIECES",
    "DEVICE",
}


_Record = tuple[str, tuple[str, ...]]
"""A class of named tuples: its name and fields."""


def stitch(
    partitions: Mapping[str, Partition],
    inputs: Sequence[str],
    weights: Sequence[str],
    title: str,
    functions: Mapping[str, str] | None = None,
) -> str:
    """The text of transformed_code.py.

    Args:
        partitions: by name of the step function.
        inputs: names of the program's arguments, in order.
        weights: names of weights and constants, in the order in which they are handed over.
        title: first line of the text.
        functions: at level 0, the source of each piece by its digest; the pieces then run as Python.
    """
    kind = _device_kind(partitions)
    records = _record_names(partitions, {*inputs, *partitions, *_piece_names(functions or {}).values()})
    texts = [_Step(name, part, inputs, weights, kind, records).text() for name, part in partitions.items()]
    parts = [
        f'"""{title}\n\n{_CONVENTION}"""',
        "import collections\nimport math\nimport operator\n\nimport torch\n\ninf, nan = math.inf, math.nan",
    ]
    parts += [
        f"{name} = collections.namedtuple({kind!r}, {list(fields)!r}, rename=True)"
        for (kind, fields), name in records.items()
    ]
    parts.append(f"DEVICE = torch.device({kind!r})")
    parts.append("WEIGHTS = (" + "".join(f"\n    {name!r}," for name in weights) + ("\n)" if weights else ")"))
    parts += texts
    if functions is not None:
        parts += _functions(partitions, functions, kind)
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


_CONVENTION = """\
Each step function is called once, with
    pieces   one callable per call of a compiled piece, in order: a list of tensors to a list of tensors
    weights  the tensors named in WEIGHTS, in that order
    empty    makes the tensors that a piece writes its result into
and returns the function that computes the model. New tensors are made on DEVICE, which a loader sets beforehand.
"""


def _device_kind(partitions: Mapping[str, Partition]) -> str:
    """`cpu` or `cuda`: where the program's inputs and weights lie."""
    nodes = (node for part in partitions.values() for node in part.traced.graph.find_nodes(op="placeholder"))
    return next((node.meta["val"].device.type for node in nodes if isinstance(node.meta["val"], torch.Tensor)), "cpu")


def _piece_names(functions: Iterable[str]) -> dict[str, str]:
    """What the functions of pieces are called, by digest."""
    return {unique: f"piece_{unique[:12]}" for unique in functions}


def _record_names(partitions: Mapping[str, Partition], taken: set[str]) -> dict[_Record, str]:
    """A name in the text for every class of named tuples that is returned."""
    count = max((len(part.calls) for part in partitions.values()), default=0)
    taken = {*_RESERVED, "inf", "nan", *taken, *(f"piece_{index}" for index in range(count))}
    found = {record for part in partitions.values() for record in _records(part.traced.output)}
    return {record: _fresh(record[0], taken) for record in sorted(found)}


def _records(value: Any) -> Iterator[_Record]:
    """The classes of named tuples in an output's structure."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield _record(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, entry.name) for entry in dataclasses.fields(value)]
    elif not isinstance(value, (tuple, list)):
        return
    for item in value:
        yield from _records(item)


def _record(value: Any) -> _Record:
    return type(value).__name__, tuple(value._fields)


def _fresh(wanted: str, taken: set[str]) -> str:
    """A name like `wanted` that is none of `taken`, which it joins."""
    base = re.sub(r"\W", "_", wanted)
    base = f"_{base}" if base[:1].isdigit() else base
    name, count = base, 1
    while name in taken:
        name, count = f"{base}_{count}", count + 1
    taken.add(name)
    return name


def _functions(partitions: Mapping[str, Partition], functions: Mapping[str, str], device: str) -> list[str]:
    """Level 0: every piece as a function, and for each step the tuple of them."""
    names = _piece_names(functions)
    placed = {unique: text.replace(value_text(torch.device(device)), "DEVICE") for unique, text in functions.items()}
    texts = [text.replace("def piece(", f"def {names[unique]}(", 1) for unique, text in placed.items()]
    tables = []
    for name, part in partitions.items():
        calls = ", ".join(f"lambda tensors: {names[call.piece.unique]}(*tensors)" for call in part.calls)
        tables.append(f"    {name!r}: ({calls}{',' if calls else ''}),")
    return [*texts, "PIECES = {\n" + "\n".join(tables) + "\n}"]


class _Step:
    """Writes one step function."""

    def __init__(
        self, name: str, part: Partition, inputs: Sequence[str], weights: Sequence[str], device: str,
        records: Mapping[_Record, str],
    ) -> None:  # fmt: skip
        self.name = name
        self.part = part
        self.device = device
        self.records = records
        """What each class of named tuples is called."""
        self.taken: set[str] = {
            *_RESERVED, *records.values(), *inputs, *(f"piece_{index}" for index in range(len(part.calls))),
        }  # fmt: skip
        self.dims = {dim: self._fresh(dim) for dim, _, _ in part.traced.range.bounds}
        """Local variable of each dimension."""
        self.names: dict[fx.Node, str] = {}
        self.weight_names = {weight: self._fresh(weight) for weight in weights}
        self.inputs = list(inputs)
        for node in part.traced.graph.nodes:
            if node.op == "placeholder":
                role, given = node.meta["role"]
                self.names[node] = given if role == "input" else self.weight_names.get(given, "_")
        self.ops: dict[str, str] = {}
        """What is looked up once, outside the step: source to local name."""

    def _fresh(self, wanted: str) -> str:
        return _fresh(wanted, self.taken)

    def _dim_source(self, dim: str) -> str | None:
        for node in self.part.traced.graph.nodes:
            if node.op == "placeholder" and node.meta["role"][0] == "input":
                sizes = parse_layout(node.meta["layout"])[1]
                if dim in sizes:
                    return f"{node.meta['role'][1]}.shape[{sizes.index(dim)}]"
        for name, low, high in self.part.traced.range.bounds:
            if name == dim and low == high:
                return str(low)
        return None

    def text(self) -> str:
        body = self._body()
        indent = "    "
        count = len(self.part.calls)
        lines = [f"def {self.name}(pieces, weights, empty=torch.empty):", f'    """{self.part.traced.range.label}."""']
        if count:
            lines.append(f"    {', '.join(f'piece_{i}' for i in range(count))}{',' if count == 1 else ''} = pieces")
        if self.weight_names:
            lines.append(
                "    (" + "".join(f"\n        {name}," for name in self.weight_names.values()) + "\n    ) = weights"
            )
        lines += [f"    {alias} = {target}" for target, alias in self.ops.items()]
        lines.append("")
        lines.append(f"    def step({', '.join(self.inputs)}):")
        code = "\n".join(line.split("  #")[0] for line in body)
        for dim, variable in self.dims.items():
            source = self._dim_source(dim)
            if source and re.search(rf"\b{variable}\b", code):
                lines.append(f"        {variable} = {source}")
        lines += [indent * 2 + line for line in body]
        lines += ["", "    return step"]
        return "\n".join(lines)

    def _body(self) -> list[str]:
        """The statements, with `del` after the last use of each tensor that a statement made."""
        blocks: list[tuple[list[str], list[fx.Node], list[fx.Node]]] = []  # lines, made, read
        index = 0
        for statement in self.part.statements:
            if isinstance(statement, Call):
                blocks.append(self._call(statement, index))
                index += 1
            else:
                blocks += [self._view(view) for view in statement.views]
                blocks.append(self._eager(statement))
        blocks += [self._view(view) for view in self.part.tail]
        returned = self._return()
        final = set(next(iter(reversed(self.part.traced.graph.nodes))).all_input_nodes)
        last: dict[fx.Node, int] = {}
        made: set[fx.Node] = set()
        for position, (_, new, read) in enumerate(blocks):
            made |= set(new)
            for node in [*new, *read]:
                last[node] = position
        lines = []
        for position, (texts, _, _) in enumerate(blocks):
            lines += texts
            dead = [self.names[n] for n, at in last.items() if at == position and n in made and n not in final]
            if dead and position < len(blocks) - 1:
                lines.append(f"del {', '.join(dict.fromkeys(dead))}")
        return [*lines, returned]

    def _name(self, node: fx.Node) -> str:
        if node not in self.names:
            self.names[node] = self._fresh(node.name)
        return self.names[node]

    def _call(self, call: Call, index: int) -> tuple[list[str], list[fx.Node], list[fx.Node]]:
        results = ", ".join(map(self._name, call.results)) + ("," if len(call.results) == 1 else "")
        comment = "; ".join(str(node.meta["layout"]) for node in call.results)
        arguments = ", ".join(self._name(node) for node in call.args)
        line = f"piece_{index}([{arguments}])"
        if call.into:
            return [self._empty(*call.results), line], call.results, call.args
        if call.results:
            line = f"{results} = {line}  # {comment}"
        return [line], call.results, call.args

    def _empty(self, node: fx.Node) -> str:
        """Makes the tensor that the next piece writes into."""
        dtype, sizes, _ = parse_layout(node.meta["layout"])
        shape = ", ".join(WORD.sub(lambda name: self.dims.get(name[0], name[0]), size) for size in sizes)
        device = self._argument(node.meta["val"].device)
        return f"{self._name(node)} = empty(({shape},), dtype={dtype}, device={_text(device)})  # {node.meta['layout']}"

    def _eager(self, statement: Eager) -> tuple[list[str], list[fx.Node], list[fx.Node]]:
        node = statement.node
        lines = []
        right = self._written(node)
        if statement.results == [node]:
            returns = schema(node.target).returns
            used = bool(node.users) and bool(returns)
            comment = f"  # {node.meta['layout']}" if node.meta.get("layout") else ""
            lines.append(f"{self._name(node)} = {right}{comment}" if used else right)
        else:
            whole = self._fresh(node.name)
            self.names[node] = whole
            lines.append(f"{whole} = {right}")
            lines += [
                f"{self._name(item)} = {whole}[{item.args[1]}]  # {item.meta.get('layout', '')}"
                for item in statement.results
            ]
            lines.append(f"del {whole}")
        if not target_text(node.target).startswith("torch.ops.fxc."):
            lines += [line for item in statement.results for line in self._border(item)]
        made = [item for item in statement.results if item.meta.get("layout") and item.users]
        return lines, made, [arg for arg in node.all_input_nodes if not is_scalar(arg)]

    def _border(self, node: fx.Node) -> list[str]:
        """An op may lay its result out otherwise than its fake promised; the next piece relies on the promise."""
        if not node.meta.get("layout") or not node.users:
            return []
        name = self._name(node)
        _, _, strides = parse_layout(node.meta["layout"])
        if strides is None:
            return [f"{name} = {name}.contiguous()"]
        wanted = f"({', '.join(strides)},)"
        fresh = f"torch.empty_strided({name}.shape, {wanted}, dtype={name}.dtype, device={name}.device).copy_({name})"
        return [f"if {name}.stride() != {wanted}:", f"    {name} = {fresh}"]

    def _view(self, node: fx.Node) -> tuple[list[str], list[fx.Node], list[fx.Node]]:
        return (
            [f"{self._name(node)} = {self._written(node)}"],
            [node],
            [a for a in node.all_input_nodes if not is_scalar(a)],
        )

    def _written(self, node: fx.Node) -> str:
        """Right-hand side with this step's names for tensors."""
        target = target_text(node.target)
        alias = self.ops.get(target)
        if alias is None and not target.startswith("operator."):
            alias = self.ops[target] = self._fresh(
                target.removeprefix("torch.ops.").removesuffix(".default").replace(".", "_")
            )
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._argument)
        if node.target is operator.getitem:
            return f"{_text(args[0])}[{_text(args[1])}]"
        parts = [_text(arg) for arg in args] + [f"{name}={_text(value)}" for name, value in kwargs.items()]
        return f"{alias}({', '.join(parts)})"

    def _argument(self, value: Any) -> Any:
        """A node, or the device of the program, by name; anything else as it is."""
        if isinstance(value, fx.Node):
            return self._source(value)
        if isinstance(value, torch.device) and value.type == self.device:
            if "DEVICE" not in self.ops:
                self.ops["DEVICE"] = self._fresh("device")
            return _Source(self.ops["DEVICE"])
        return value

    def _source(self, node: fx.Node) -> _Source:
        """A tensor by its name, a size number as an expression of the variables of dimensions."""
        if not is_scalar(node):
            return _Source(self._name(node))
        value = node.meta["val"]
        if isinstance(value, (int, float, bool)):
            return _Source(value_text(value))
        expr = node.meta["expr"]
        if unknown := set(WORD.findall(expr)) - self.dims.keys() - NAMES.keys():
            raise TraceError(
                f"{node.name} = {', '.join(sorted(unknown))}, a number read out of a tensor, is used outside the piece",
                "hand it on as a tensor",
            )
        return _Source(WORD.sub(lambda name: self.dims.get(name[0], name[0]), expr))

    def _return(self) -> str:
        return f"return {self._structure(self.part.traced.output)}"

    def _structure(self, value: Any) -> str:
        """The output's structure as source."""
        if isinstance(value, fx.Node):
            return self._source(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self.records[_record(value)]}({', '.join(map(self._structure, value))})"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._structure, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._structure, value))}]"
        if isinstance(value, OrderedDict):
            return f"collections.OrderedDict({self._structure(dict(value))})"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{k!r}: {self._structure(v)}" for k, v in value.items()) + "}"
        if dataclasses.is_dataclass(value):
            fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            return "{" + ", ".join(f"{k!r}: {self._structure(v)}" for k, v in fields) + "}"
        return value_text(value)


def output_text(value: Any) -> str:
    """The structure of the output for people, with names of nodes for tensors."""
    return str(torch.fx.node.map_arg(value, lambda node: node.name))


def unique_pieces(partitions: Iterable[Partition]) -> dict[str, Call]:
    """The first call of each unique piece, by digest."""
    found: dict[str, Call] = {}
    for part in partitions:
        for call in part.calls:
            found.setdefault(call.piece.unique, call)
    return found


class _Source(str):
    """Source that is put in as it stands."""


def _text(value: Any) -> str:
    if isinstance(value, _Source):
        return str(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, _Source) for item in value):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return value_text(value)
