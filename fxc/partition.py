"""A graph to pieces: cut at the splitting ops, make each piece self-contained, give equal pieces one text. Pure.

What crosses a border is tensors alone. Size numbers are computed again inside each piece from a tensor that has that
size; where no input of the piece has it, a model input that does is passed along. A view of a tensor that is written
into is made again on the other side, so that both sides share memory with the tensor itself.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from fxc._torch_build import OpOverload, has_effect, overload, schema
from fxc.errors import SpecError
from fxc.ops import kv_write
from fxc.region import OWN_NAMESPACES, Call, Region, is_shared_view, needed_views, reads_data
from fxc.scalars import is_scalar
from fxc.traced import Traced

OPEN = (kv_write,)
"""Ops with an effect that a build makes kernels or plain ops of before it compiles a piece."""
_COPIES = ("aten::clone", "aten::contiguous", "aten::_to_copy")


@dataclass
class Eager:
    """An op that runs as itself, with the views of its arguments that have to be made again first."""

    node: fx.Node
    views: list[fx.Node]
    results: list[fx.Node]


@dataclass
class Partition:
    """A traced graph in pieces, in the order in which they run."""

    traced: Traced
    statements: list[Call | Eager] = field(default_factory=list)
    tail: list[fx.Node] = field(default_factory=list)
    """Views made again for the output."""

    @property
    def calls(self) -> list[Call]:
        return [statement for statement in self.statements if isinstance(statement, Call)]


def check_splitting_ops(names: Iterable[str]) -> None:
    """Every name must be a registered op.

    Raises:
        SpecError: names the op that is not.
    """
    for name in names:
        namespace, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace, None), op, None) if rest else None
        if packet is None or (overload and overload not in packet.overloads()):
            raise SpecError(
                f"partition.splitting_ops: {name!r} is no registered op",
                "write NAMESPACE::NAME or NAMESPACE::NAME.OVERLOAD; the model's file must import what registers it",
            )


def is_splitting(node: fx.Node, names: Sequence[str]) -> bool:
    """Whether the graph is cut at this node: a listed op, or an op outside aten with an effect.

    The latter since Inductor may drop a copy that such an op relies on, as it cannot see inside. It does see inside
    `OPEN` ones.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    name = schema(target).name
    if _name_among(node, names) is not None:
        return True
    if name in _COPIES and _protects(node):
        return True
    return target.namespace not in OWN_NAMESPACES and target not in OPEN and has_effect(target)


def _name_among(node: fx.Node, names: Collection[str]) -> str | None:
    """Which of `names` means the op, with or without its overload."""
    name = schema(node.target).name
    return next((given for given in (name, f"{name}.{overload(node.target)}") if given in names), None)


def _protects(node: fx.Node) -> bool:
    """Whether a copy shields its value from an op, opaque to Inductor, that writes into the original or the copy."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return any(root.meta.get("written_by_custom") for root in (source, source.meta.get("base", source), node))


def partition(
    traced: Traced, splitting_ops: Sequence[str], compiled_ops: Mapping[str, OpOverload] = MappingProxyType({})
) -> Partition:
    """Cut the graph. Nodes between two cuts are one piece, in their original order.

    Args:
        splitting_ops: qualified names of the ops to cut at; an overload may be named.
        compiled_ops: those of them that are pieces of their own instead of eager calls, and the overload that writes
            into an argument `out`, which such a piece calls.
    """
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    _mark_custom_writes(nodes)
    region: dict[fx.Node, int] = {}
    eager: dict[int, fx.Node] = {}
    outs: dict[int, OpOverload] = {}
    current = 0
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in region and region[node.args[0]] in eager:
            region[node] = region[node.args[0]]
        elif is_splitting(node, splitting_ops):
            name = _name_among(node, compiled_ops)
            if name is None:
                eager[current + 1] = node
            else:
                outs[current + 1] = compiled_ops[name]
            region[node] = current + 1
            current += 2
        elif not is_scalar(node) or reads_data(node):
            region[node] = current
    result = Partition(traced)
    members: dict[int, list[fx.Node]] = {}
    for node, index in region.items():
        members.setdefault(index, []).append(node)
    for index in sorted(members):
        if index in eager or all("base" in node.meta for node in members[index]):
            result.statements += _eager(members[index], index, region)
        elif (call := Region(traced, members[index], index, region, outs.get(index)).call()) is not None:
            result.statements.append(call)
    output = next(iter(reversed(traced.graph.nodes)))
    result.tail = needed_views(output.all_input_nodes, current + 1, region)
    return result


def _eager(members: list[fx.Node], index: int, region: Mapping[fx.Node, int]) -> list[Eager]:
    """Statements for a splitting op, or for a region of nothing but views, which is not worth a binary."""
    statements = []
    for node in members:
        if node.target is not operator.getitem and not is_shared_view(node):  # those are made where they are used
            items = [item for item in members if item.target is operator.getitem and item.args[0] is node]
            statements.append(Eager(node, needed_views(node.all_input_nodes, index, region), items or [node]))
    return statements


def _mark_custom_writes(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace in OWN_NAMESPACES:
            continue
        for position, argument in enumerate(schema(target).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, fx.Node):
                        tensor.meta.get("base", tensor).meta["written_by_custom"] = True
