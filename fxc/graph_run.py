"""Runs graphs as they were traced, op by op, on made-up tensors: what is compared with what was made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fxc.graph_text import parse_layout
from fxc.random_inputs import draw
from fxc.scalars import compute
from fxc.traced import Traced

Role = tuple[str, str]
"""("input" | "weight" | "constant", name)"""


def drawn(
    layout: str, point: Mapping[str, int], values: tuple[float, float] | None, device: str, seed: int
) -> torch.Tensor:
    """A random tensor of a layout such as `f32[n, 8] strides(8, 1)`, with sizes as they are at `point`.

    Matrices of static sizes, weights that is, are scaled so that products stay near 1.
    """
    dtype, sizes, strides = parse_layout(layout)
    shape = [int(compute(size, point)) for size in sizes]
    stride = None if strides is None else [int(compute(step, point)) for step in strides]
    extent = shape if stride is None else [_extent(shape, stride)]
    tensor = draw(extent, dtype, values, torch.Generator(device).manual_seed(seed))
    if stride is not None:
        tensor = tensor.as_strided(shape, stride)
    static = all(size.isdigit() for size in sizes)
    if static and dtype.is_floating_point and tensor.ndim >= 2 and values is None:
        memory = _memory(tensor)
        memory.copy_(memory.float() * shape[-1] ** -0.5)
    return tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides; places that share memory still do."""
    return _memory(tensor).clone().as_strided(tensor.shape, tensor.stride())


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory lie between the first and the last, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All that a tensor lies on, as one row: elements that several places show (stride 0) once."""
    return tensor.as_strided([_extent(tensor.shape, tensor.stride())], [1])


def arguments(
    traces: Iterable[Traced], point: Mapping[str, int], device: str, limit: int
) -> dict[Role, torch.Tensor] | None:
    """What the graphs read, made up but for constants; None where it takes more than `limit` bytes."""
    nodes: dict[Role, tuple[Traced, fx.Node]] = {}
    for traced in traces:
        for node in traced.graph.find_nodes(op="placeholder"):
            if node.users or node.meta["role"][0] == "input":  # a size may be asked of an input that nothing reads
                nodes.setdefault(node.meta["role"], (traced, node))
    layouts = [parse_layout(node.meta["layout"]) for _, node in nodes.values()]
    counts = [math.prod(int(compute(size, point)) for size in sizes) for _, sizes, _ in layouts]
    if sum(dtype.itemsize * count for (dtype, _, _), count in zip(layouts, counts, strict=True)) > limit:
        return None
    return {
        role: traced.constants[role[1]].to(device)
        if role[0] == "constant"
        else drawn(node.meta["layout"], point, node.meta["values"], device, seed)
        for seed, (role, (traced, node)) in enumerate(nodes.items())
    }


def run(
    traced: Traced, tensors: Mapping[Role, torch.Tensor], point: Mapping[str, int], device: str
) -> tuple[list[torch.Tensor], dict[Role, torch.Tensor]]:
    """Results, and what the graph has written into as it is afterwards. `tensors` stay as they are.

    Raises:
        WrongShape: a shape is not what the trace says.
    """
    graph = placed(traced.graph, torch.device(device))
    roles = [node.meta["role"] if node.users else None for node in traced.graph.find_nodes(op="placeholder")]
    given = own(traced, tensors)
    with torch.no_grad(), seeded(device):
        interpreter = _Checked(graph, {node.name: shape_at(node, point) for node in traced.graph.nodes})
        outputs = interpreter.run(*(role and given[role] for role in roles), enable_io_processing=False)
    written = {role: tensor for role, tensor in given.items() if tensor is not tensors[role]}
    return [value for value in outputs if isinstance(value, torch.Tensor)], written


def own(traced: Traced, tensors: Mapping[Role, torch.Tensor]) -> dict[Role, torch.Tensor]:
    """`tensors`, with copies of those that the graph writes into."""
    return {role: copied(t) if role[1] in traced.mutated else t for role, t in tensors.items()}


@contextmanager
def seeded(device: str) -> Iterator[None]:
    """A context in which random numbers are the same each time, and which leaves the caller's alone, on all GPUs: model
    code may seed them.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs that are not in use yet, later
        if device == "cuda":
            torch.cuda.manual_seed(0)
        yield


def shape_at(node: fx.Node, point: Mapping[str, int]) -> list[int] | None:
    """The shape that the trace gave the node, at `point`; None where it depends on data or there is none."""
    if node.meta.get("layout") is None:
        return None
    try:
        return [int(compute(size, point)) for size in parse_layout(node.meta["layout"])[1]]
    except KeyError:
        return None


class WrongShape(Exception):  # noqa: N818  told as a ProofError by who compares
    """An op gives another shape than its fake did in the trace; compiled code would rely on that one."""


class _Checked(fx.Interpreter):
    """Runs a graph and fails where a shape is not what the trace says."""

    def __init__(self, graph: fx.Graph, shapes: Mapping[str, list[int] | None]) -> None:
        super().__init__(fx.GraphModule({}, graph))
        self.shapes = shapes

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        expected = self.shapes.get(node.name)
        if isinstance(result, torch.Tensor) and expected is not None and list(result.shape) != expected:
            raise WrongShape(f"{node.name} has shape {list(result.shape)}, the trace says {expected}")
        return result


def placed(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """A copy that makes its tensors on `device`, whatever the model is built for."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))

    def moved(value: object) -> object:
        return device if isinstance(value, torch.device) else value

    for node in copy.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)  # type: ignore[arg-type]
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)  # type: ignore[arg-type]
    return copy
