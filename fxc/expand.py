"""Triton's kernels, put into a graph in place of the ops that launch them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxc._torch_build import Symbols, python_dispatcher


def expand(
    module: fx.GraphModule,
    inputs: tuple[torch.Tensor, ...],
    symbols: Symbols,
    kernels: Mapping[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """Put Triton's kernels into a graph in place of ops that launch them, so that they become part of the binary.

    Args:
        kernels: op -> what computes it, with `torch.library.wrap_triton` around each kernel.
    """
    graph = module.graph
    found = [node for node in graph.nodes if node.target in kernels]
    if not found:
        return module
    values: dict[fx.Node, Any] = {}

    class Values(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    with symbols.mode, python_dispatcher():  # some ops are written in terms of others for symbols in Python only
        Values(module).run(*inputs)
        for node in found:
            _inline(module, node, kernels[node.target], values)
    graph.lint()
    module.recompile()
    return module


def _inline(module: fx.GraphModule, node: fx.Node, kernel: Callable[..., Any], values: dict[fx.Node, Any]) -> None:
    """Put what `kernel` does in place of a node. The rest of the graph stays as it is."""
    graph, given = module.graph, node.all_input_nodes

    def call(*tensors: Any) -> Any:
        known = dict(zip(given, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        return kernel(*args, **kwargs)

    # Not functionalised: then a kernel's write into an input would be lost.
    inner = make_fx(call)(*(values[n] for n in given))
    places: dict[fx.Node, fx.Node] = dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for constant in inner.graph.find_nodes(op="get_attr"):
            name = f"{node.name}_{constant.target}"
            setattr(module, name, getattr(inner, constant.target))
            places[constant] = graph.get_attr(name)
        result = graph.graph_copy(inner.graph, places)
    if isinstance(result, (list, tuple)):
        for item in list(node.users):
            made = result[int(item.args[1])]  # type: ignore[arg-type]
            values[made] = values[item]  # the next op of ours may read it
            item.replace_all_uses_with(made)
            graph.erase_node(item)
    elif isinstance(result, fx.Node):
        values[result] = values[node]
        node.replace_all_uses_with(result)
    graph.erase_node(node)
