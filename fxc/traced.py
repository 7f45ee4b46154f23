"""What a trace is, and the clean-up that makes it: sizes and placeholders named, conditions out, writes resolved."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fxc import _torch_build as private
from fxc._torch_build import OpOverload
from fxc.aliases import may_view
from fxc.cache import key
from fxc.errors import TraceError
from fxc.graph_text import layout, source_line
from fxc.guards import guards
from fxc.scalars import compute
from fxc.shapes import Range, parse_size
from fxc.spec import InputSpec


@dataclass
class Condition:
    """Something the trace took for granted about the sizes."""

    text: str
    holds: Callable[[Mapping[str, Any]], Any]
    """Of the values of the dimensions; where the condition can be computed so, of arrays of values too."""


@dataclass
class Traced:
    """One graph and the shapes it was captured for.

    Placeholders are named and carry `meta["role"]`: ("input" | "weight" | "constant", name). Every node that makes a
    tensor has `meta["layout"]`; every size number `meta["expr"]`, its expression in names of dimensions.
    """

    range: Range
    graph: fx.Graph
    output: Any
    """The output's own structure; leaves are nodes, None or plain numbers."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    conditions: list[Condition] = field(default_factory=list)
    mutated: set[str] = field(default_factory=set)
    """Names of inputs, weights and constants that the graph writes into."""
    original: Traced | None = None
    """What was traced, where passes have changed the whole graph."""


def normalise(
    exported: torch.export.ExportedProgram, inputs: Mapping[str, InputSpec], box: Range, model: nn.Module
) -> Traced:
    """Name sizes and placeholders, take conditions out of the graph, drop what computes nothing."""
    graph = exported.graph
    _inline_contexts(exported.graph_module)
    roles, constants = _roles(exported, model)
    names = _dimension_names(graph, roles, inputs, box)
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["layout"] = layout(value, partial(_written, names=names))
        elif (expr := private.expression(value)) is not None:
            node.meta["expr"] = private.render(expr, names)
        if node.op == "placeholder":
            node.meta["role"] = role, given = roles[node.name]
            node.meta["values"] = inputs[given].values if role == "input" else None
    _copy_instead_of_cat(graph)
    conditions: list[Condition] = []
    for condition in (*_assertions(graph), *_guards(graph, names)):
        if not any(f"{known.text} ".startswith(f"{condition.text} ") for known in conditions):  # told with its place
            conditions.append(condition)
    _drop_dropout(graph)
    output_node = next(iter(reversed(graph.nodes)))
    mutated = _resolve_mutation(graph)
    _check_state(mutated, model)
    _sweep(graph)
    output = private.unflatten(list(output_node.args[0]), exported.call_spec.out_spec)
    used = {node.meta["role"][1] for node in graph.nodes if node.op == "placeholder" and node.users}
    return Traced(
        range=box, graph=graph, output=output, conditions=conditions,
        constants={name: value for name, value in constants.items() if name in used},
        mutated={node.meta["role"][1] for node in mutated},
    )  # fmt: skip


def _dimension_names(
    graph: fx.Graph, roles: Mapping[str, tuple[str, str]], inputs: Mapping[str, InputSpec], box: Range
) -> dict[str, str]:
    """Symbol of torch -> name of the dimension."""
    names: dict[str, str] = {}
    dynamic = {name for name, low, high in box.bounds if low < high}
    derived: list[tuple[Any, str, int]] = []
    for node in graph.nodes:
        if node.op != "placeholder" or roles[node.name][0] != "input":
            continue
        name = roles[node.name][1]
        for size, (part, more) in zip(node.meta["val"].shape, map(parse_size, inputs[name].shape), strict=True):
            expr = private.expression(size)
            if part not in dynamic:
                continue
            if more and expr is not None:
                derived.append((expr, part, more))
                continue
            if expr is None:
                raise TraceError(
                    f"the model fixes {part} to {size}: input {name} cannot have another size",
                    f"give dims.{part} min and max {size}, or remove what ties it to a width of the model",
                )
            if not expr.is_Symbol:
                raise TraceError(f"the model needs {part} to be {expr}", "choose the dimension so that it is free")
            names[expr.name] = part
    for expr, part, more in derived:
        if private.render(expr - more, names) != part:
            raise TraceError(
                f"the model needs {part} + {more} to be {private.render(expr, names)}",
                "choose the dimension so that it is free",
            )
    return names


def _written(size: Any, names: Mapping[str, str]) -> str:
    """A size in names of dimensions, spelled as `meta["expr"]` of a size number is."""
    expr = private.expression(size)
    return str(size) if expr is None else private.render(expr, names)


def _roles(
    exported: torch.export.ExportedProgram, model: nn.Module
) -> tuple[dict[str, tuple[str, str]], dict[str, torch.Tensor]]:
    """Placeholder -> (role, name); and the values of constants, by name. A tied weight has one name."""
    kind = torch.export.graph_signature.InputKind
    canonical: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    persistent = model.state_dict(keep_vars=True)
    for name, tensor in named:
        if name in persistent:
            canonical.setdefault(id(tensor), name)
    first = {name: canonical[id(tensor)] for name, tensor in named if name in persistent}
    leaves = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is kind.USER_INPUT]
    _, given = private.unflatten(leaves, exported.call_spec.in_spec)
    inputs = {leaf: name for name, leaf in given.items()}
    roles: dict[str, tuple[str, str]] = {}
    constants: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        target = spec.target or name
        if spec.kind is kind.PARAMETER or (spec.kind is kind.BUFFER and spec.persistent):
            roles[name] = ("weight", first.get(target, target))
        elif spec.kind in (kind.BUFFER, kind.CONSTANT_TENSOR):
            value = private.value(exported.constants[target]).detach()
            if not value.is_contiguous():
                raise TraceError(f"the constant {target} has strides {value.stride()}", "make it .contiguous() first")
            known = target if spec.kind is kind.BUFFER else _content_name(value)
            roles[name] = ("constant", known)
            constants[known] = value
        elif spec.kind is kind.USER_INPUT:
            roles[name] = ("input", inputs[name])
        else:
            raise TraceError(f"the traced graph takes {name}, a {spec.kind.name.lower()}, which fxc cannot store")
    return roles, constants


def _content_name(value: torch.Tensor) -> str:
    """Export numbers lifted constants in each trace anew: a name by content is the same, or another, in every trace."""
    data = value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"constant_{key.digest(repr((value.dtype, tuple(value.shape))).encode() + data)[:16]}"


def _inline_contexts(module: fx.GraphModule) -> None:
    """Inline `with torch.no_grad()` and `with autocast(enabled=False)` blocks, which export keeps as submodules."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            module.graph.erase_node(node)
            continue
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        sub = next(arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr")
        if name == "wrap_with_autocast" and node.args[2]:
            raise TraceError("the model enters torch.autocast, which fxc does not apply", "set model.dtype instead")
        body: fx.GraphModule = getattr(module, str(sub.target))
        _inline_contexts(body)
        tail = node.args[node.args.index(sub) + 1 :]
        mapping: dict[fx.Node, Any] = dict(
            zip([n for n in body.graph.nodes if n.op == "placeholder"], tail, strict=True)
        )
        with module.graph.inserting_before(node):
            result: Any = module.graph.graph_copy(body.graph, mapping)
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)


def _copy_instead_of_cat(graph: fx.Graph) -> None:
    """Concatenating one tensor with empty ones is a copy of it. Inductor knows, but gives the copy other strides."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        value = node.meta["val"]
        full = [part for part in node.args[0] if not _is_empty(part.meta["val"])]
        if len(full) == 1 and full[0].meta["val"].dtype == value.dtype and value.is_contiguous():
            node.target = torch.ops.aten.clone.default
            node.args, node.kwargs = (full[0],), {"memory_format": torch.contiguous_format}


def _is_empty(value: torch.Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in value.shape)


def _has_effect(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, OpOverload) and private.has_effect(node.target)


def _assertions(graph: fx.Graph) -> Iterator[Condition]:
    """Runtime assertions over sizes, as conditions; the nodes lose their users and are swept."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        name = private.schema(node.target).name
        if name == "aten::_assert_scalar":
            test = node.args[0]
            graph.erase_node(node)
            if isinstance(test, fx.Node):
                place = source_line(test)
                yield Condition(
                    test.meta["expr"] + (f" ({place})" if place else ""), partial(compute, test.meta["expr"])
                )
        elif name in (
            "aten::_assert_tensor_metadata",
            "aten::sym_constrain_range",
            "aten::sym_constrain_range_for_size",
        ):
            graph.erase_node(node)


def _guards(graph: fx.Graph, names: Mapping[str, str]) -> Iterator[Condition]:
    for expr, place in guards(graph):
        symbols = {symbol: names[symbol.name] for symbol in expr.free_symbols if symbol.name in names}
        if len(symbols) != len(expr.free_symbols) or not symbols:
            continue

        text = private.render(expr, names)

        def holds(sizes: Mapping[str, Any], expr: Any = expr, symbols: Any = symbols, text: str = text) -> Any:
            if not all(isinstance(sizes[name], int) for name in symbols.values()):
                return compute(text, sizes)  # of arrays; sympy knows numbers alone
            return bool(expr.xreplace({symbol: private.integer(sizes[name]) for symbol, name in symbols.items()}))

        yield Condition(text + (f" ({place})" if place else ""), holds)


def _resolve_mutation(graph: fx.Graph) -> set[fx.Node]:
    """Make every later use of an in-place op's result a use of the tensor it wrote into; find written placeholders.

    Sets `meta["base"]` on views: the node whose memory they show.
    """
    base: dict[fx.Node, fx.Node] = {}
    mutated: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0] in base:
            inputs = node.args[0].all_input_nodes
            shown = (each for each in inputs if private.same_memory(node.meta["val"], each.meta["val"]))
            source = next(shown, node.args[0])
            base[node] = base.get(source, source)
        if not isinstance(node.target, OpOverload):
            continue
        schema = private.schema(node.target)
        for position, argument in enumerate(schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            for source in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(source, fx.Node):
                    continue
                root = base.get(source, source)
                if written:
                    root.meta["written"] = True
                    if root.op == "placeholder":
                        mutated.add(root)
                elif may_view(node.target) and private.same_memory(node.meta["val"], source.meta["val"]):
                    base[node] = root
            if isinstance(value, fx.Node) and _returns(schema, argument):
                node.replace_all_uses_with(value, delete_user_cb=lambda user, node=node: user is not node)
    for node, root in base.items():
        node.meta["base"] = root
    return mutated


def _drop_dropout(graph: fx.Graph) -> None:
    """Outside training dropout returns its input, the tensor itself, which its schema does not say."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.dropout.default and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _check_state(mutated: Iterable[fx.Node], model: nn.Module) -> None:
    """Only a buffer can be written: export has changed any other tensor of the model by now."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for node in mutated:
        role, name = node.meta["role"]
        if role == "constant" and name not in buffers:
            shown = node.meta["layout"]
            raise TraceError(
                f"the model writes into a tensor, {shown}, that is neither an input nor a parameter nor a buffer",
                "register it as a buffer: register_buffer(NAME, TENSOR, persistent=False)",
            )


def _returns(schema: Any, argument: Any) -> bool:
    """Whether the op's result is `argument`, which it wrote into: `Tensor(a!)` on both sides."""
    if len(schema.returns) != 1 or argument.alias_info is None or not argument.alias_info.is_write:
        return False
    result = schema.returns[0].alias_info
    return result is not None and result.before_set == argument.alias_info.before_set


def _sweep(graph: fx.Graph) -> None:
    """Remove nodes without use or effect."""
    for node in reversed(list(graph.nodes)):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)
