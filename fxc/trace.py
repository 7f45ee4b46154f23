"""A model to a graph: torch.export, then the clean-up that makes the graph printable and its sizes named."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxc import _torch_build as private
from fxc.errors import TraceError
from fxc.graph_text import layout, source_line
from fxc.scalars import evaluate
from fxc.shapes import Range
from fxc.spec import InputSpec

_PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 31, 29, 23, 19, 17, 13, 11, 7, 5, 3)


@dataclass
class Condition:
    """Something the trace took for granted about the sizes."""

    text: str
    holds: Callable[[Mapping[str, int]], bool]


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
    how: str = ""
    """Which way of exporting worked."""


class Narrowed(Exception):
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


def example_inputs(
    inputs: Mapping[str, InputSpec], sizes: Mapping[str, int], device: str, generator: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """Made-up inputs: integers from `values` (0 and 1 by default), floats from `values` or a standard normal."""
    made = {}
    for name, spec in inputs.items():
        shape = [sizes[part] if isinstance(part, str) else part for part in spec.shape]
        dtype = getattr(torch, spec.dtype)
        made[name] = draw(shape, dtype, spec.values, generator).to(device)
    return made


def draw(
    shape: Sequence[int], dtype: torch.dtype, values: tuple[float, float] | None, generator: torch.Generator | None
) -> torch.Tensor:
    """A random tensor on the CPU with entries in the half-open range `values`."""
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        if values is None:
            return torch.randn(list(shape), dtype=wide, generator=generator).to(dtype)
        low, high = values
        return (torch.rand(list(shape), generator=generator) * (high - low) + low).to(dtype)
    low, high = (0, 2) if values is None else values
    return torch.randint(int(low), max(int(high), int(low) + 1), list(shape), generator=generator).to(dtype)


def with_fake_weights(model: nn.Module, device: str) -> nn.Module:
    """Replace, in place, parameters and meta buffers by fake tensors on `device`; other buffers move there.

    Tied parameters stay tied. Nothing is allocated for a parameter.
    """
    mode = private.fake_mode()
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            fakes[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        return fakes[id(tensor)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fake(parameter)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer) if buffer.is_meta else buffer.to(device)
    return model


_WAYS: tuple[tuple[str, dict[str, bool]], ...] = (
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
    example = example_inputs(inputs, sizes, device)
    dims = {name: torch.export.Dim(name, min=low, max=high) for name, low, high in box.bounds if low < high}
    dynamic = {
        name: {i: dims[part] for i, part in enumerate(spec.shape) if isinstance(part, str) and part in dims}
        for name, spec in inputs.items()
    }
    failures: list[tuple[str, Exception]] = []
    narrowed: Narrowed | None = None
    for how, options in _WAYS:
        try:
            with torch.no_grad():
                exported = torch.export.export(model, (), example, dynamic_shapes=dynamic, **options)
            return _normalise(exported, inputs, box, how, model)
        except Exception as error:
            failures.append((how, error))
            narrowed = narrowed or _narrowed(error, box, sizes)
            if narrowed and how != "non-strict":
                raise narrowed from None
    raise _explain(failures, model)


_SUGGESTED = re.compile(r"^\s+(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", re.MULTILINE)


def _narrowed(error: Exception, box: Range, sizes: Mapping[str, int]) -> Narrowed | None:
    """The part of `box` that export says it can do, from its 'Suggested fixes'."""
    part = box
    for name, low, high in _SUGGESTED.findall(str(error)):
        bounds = {n: (lo, hi) for n, lo, hi in box.bounds}
        if name in bounds:
            part = part.replace(name, int(low or bounds[name][0]), int(high or bounds[name][1]))
    if part == box or not part.contains(sizes):
        return None
    return Narrowed(part, _first_line(error))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    details = [line for line in lines if line.startswith("- ")]
    return (details or lines or [type(error).__name__])[0].removeprefix("- ")


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
    own = [(file, line) for file, line in frames if "/torch/" not in file and "/fxc/" not in file and "<" not in file]
    if own:
        import linecache

        file, line = own[-1]
        place = f" at {file}:{line}: {linecache.getline(file, line).strip()}"
    message = f"{type(model).__name__} cannot be traced: {_first_line(error)}{place}"
    others = {_first_line(failure) for _, failure in failures[1:]} - {_first_line(error)}
    hint = "tried " + "; ".join(how for how, _ in failures)
    if others:
        hint += ". Also: " + "; ".join(sorted(others))
    return TraceError(message, hint)


def _normalise(
    exported: torch.export.ExportedProgram, inputs: Mapping[str, InputSpec], box: Range, how: str, model: nn.Module
) -> Traced:
    """Name sizes and placeholders, take conditions out of the graph, drop what computes nothing."""
    graph = exported.graph
    _inline_contexts(exported.graph_module)
    names = _dimension_names(graph, exported, inputs, box)
    roles, constants = _roles(exported, model)
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["layout"] = _named_layout(value, names)
        elif (expr := private.expression(value)) is not None:
            node.meta["expr"] = private.render(expr, names)
        if node.op == "placeholder":
            node.meta["role"] = roles.get(node.name, ("input", node.name))
            if node.name in inputs:
                node.meta["values"] = inputs[node.name].values
    conditions = [*_assertions(graph), *_guards(graph, names)]
    output_node = next(iter(reversed(graph.nodes)))
    mutated = _resolve_mutation(graph)
    _sweep(graph)
    output = private.unflatten(list(output_node.args[0]), exported.call_spec.out_spec)
    used = {node.meta["role"][1] for node in graph.nodes if node.op == "placeholder" and node.users}
    return Traced(
        range=box, graph=graph, output=output, conditions=conditions, how=how,
        constants={name: value for name, value in constants.items() if name in used},
        mutated={node.meta["role"][1] for node in mutated},
    )  # fmt: skip


def _dimension_names(
    graph: fx.Graph, exported: torch.export.ExportedProgram, inputs: Mapping[str, InputSpec], box: Range
) -> dict[str, str]:
    """Symbol of torch -> name of the dimension."""
    names: dict[str, str] = {}
    dynamic = {name for name, low, high in box.bounds if low < high}
    for node in graph.nodes:
        if node.op != "placeholder" or node.name not in inputs:
            continue
        value = node.meta["val"]
        for size, part in zip(value.shape, inputs[node.name].shape, strict=True):
            expr = private.expression(size)
            if part not in dynamic:
                continue
            if expr is None:
                raise TraceError(
                    f"the model fixes {part} to {size}: input {node.name} cannot have another size",
                    f"give dims.{part} min and max {size}, or remove what ties it to a width of the model",
                )
            if not expr.is_Symbol:
                raise TraceError(f"the model needs {part} to be {expr}", "choose the dimension so that it is free")
            names[expr.name] = str(part)
    return names


def _named_layout(value: torch.Tensor, names: Mapping[str, str]) -> str:
    text = layout(value)
    return re.sub(r"\b[su]\d+\b", lambda match: names.get(match[0], match[0]), text) if names else text


def _roles(
    exported: torch.export.ExportedProgram, model: nn.Module
) -> tuple[dict[str, tuple[str, str]], dict[str, torch.Tensor]]:
    """Placeholder -> (role, name); and the values of constants, by name. A tied weight has one name."""
    kind = torch.export.graph_signature.InputKind
    canonical: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical.setdefault(id(parameter), name)
    first = {name: canonical[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    roles: dict[str, tuple[str, str]] = {}
    constants: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        target = spec.target or name
        if spec.kind is kind.PARAMETER or (spec.kind is kind.BUFFER and spec.persistent):
            roles[name] = ("weight", first.get(target, target))
        elif spec.kind in (kind.BUFFER, kind.CONSTANT_TENSOR):
            value = exported.constants[target]
            roles[name] = ("constant", target)
            constants[target] = value.detach()
        elif spec.kind is kind.USER_INPUT:
            roles[name] = ("input", name)
        else:
            raise TraceError(f"the traced graph takes {name}, a {spec.kind.name.lower()}, which fxc cannot store")
    return roles, constants


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
        mapping: dict[fx.Node, Any] = dict(zip([n for n in body.graph.nodes if n.op == "placeholder"], tail, strict=True))
        with module.graph.inserting_before(node):
            result: Any = module.graph.graph_copy(body.graph, mapping)
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _assertions(graph: fx.Graph) -> Iterator[Condition]:
    """Runtime assertions over sizes, as conditions; the nodes lose their users and are swept."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        if name == "aten::_assert_scalar":
            test, message = node.args[0], str(node.args[1])
            graph.erase_node(node)
            if isinstance(test, fx.Node):
                yield Condition(_plain(message, test), lambda sizes, test=test: bool(evaluate(test, sizes)))
        elif name in ("aten::_assert_tensor_metadata", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"):
            graph.erase_node(node)


def _plain(message: str, node: fx.Node) -> str:
    place = source_line(node)
    found = re.search(r"expression (.*) on node", message)
    return (found[1] if found else message) + (f" ({place})" if place else "")


def _guards(graph: fx.Graph, names: Mapping[str, str]) -> Iterator[Condition]:
    for expr, place in private.guards(graph):
        symbols = {symbol: names[symbol.name] for symbol in expr.free_symbols if symbol.name in names}
        if len(symbols) != len(expr.free_symbols) or not symbols:
            continue

        def holds(sizes: Mapping[str, int], expr: Any = expr, symbols: Any = symbols) -> bool:
            return bool(expr.xreplace({symbol: private.integer(sizes[name]) for symbol, name in symbols.items()}))

        yield Condition(private.render(expr, names) + (f" ({place})" if place else ""), holds)


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
            base[node] = base[node.args[0]]
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None:
                continue
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            for source in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(source, fx.Node):
                    continue
                root = base.get(source, source)
                if argument.alias_info.is_write:
                    root.meta["written"] = True
                    if root.op == "placeholder":
                        mutated.add(root)
                elif schema.returns and schema.returns[0].alias_info is not None:
                    base[node] = root
            if argument.alias_info.is_write and isinstance(value, fx.Node) and len(schema.returns) == 1:
                node.replace_all_uses_with(value, delete_user_cb=lambda user, node=node: user is not node)
    for node, root in base.items():
        node.meta["base"] = root
    return mutated


def _sweep(graph: fx.Graph) -> None:
    """Remove nodes without use or effect."""
    for node in reversed(list(graph.nodes)):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)


def source_files(graph: fx.Graph) -> set[str]:
    """Source files, torch's own left out, that lines of the graph come from."""
    files = {file for node in graph.nodes for file, _, _ in _LINE.findall(node.meta.get("stack_trace") or "")}
    return {file for file in files if "/torch/" not in file and "<" not in file}


def model_files(model: nn.Module) -> set[str]:
    """Source files of the classes of all submodules, torch's own left out."""
    files = set()
    for module in model.modules():
        for cls in type(module).__mro__:
            try:
                file = inspect.getsourcefile(cls)
            except TypeError:
                continue
            if file and "/torch/" not in file:
                files.add(file)
    return files
