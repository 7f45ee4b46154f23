"""What a program returns, as the manifest tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from fxc.graph_text import parse_layout
from fxc.manifest import Tensor
from fxc.scalars import is_scalar
from fxc.traced import Traced


def common_results(traces: Sequence[Traced]) -> tuple[Tensor, ...]:
    """The results, if all graphs describe them alike."""
    first, *others = (tuple(_results(traced)) for traced in traces)
    shapes = [tensor.shape for tensor in first]
    return first if all([tensor.shape for tensor in other] == shapes for other in others) else ()


def _results(traced: Traced) -> Iterator[Tensor]:
    """The tensors that the graph returns, with their sizes as expressions of dimensions."""
    leaves: list[fx.Node] = []
    fx.node.map_arg(traced.output, lambda node: leaves.append(node))
    for node in leaves:
        if not is_scalar(node):
            dtype, sizes, _ = parse_layout(node.meta["layout"])
            shape = tuple(int(size) if size.isdigit() else size for size in sizes)
            yield Tensor(name=node.name, shape=shape, dtype=str(dtype).removeprefix("torch."))
