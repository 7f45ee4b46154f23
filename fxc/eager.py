"""An artifact's traced graph as a module: what eager is to a program whose model is not at hand.

The module calls the ops of the graph one after another, as the model did, attention included. Weights and constants are
its parameters and buffers, and so are bound inputs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxc._torch_build import draws
from fxc.cache import Artifact
from fxc.errors import DamagedError, RunError
from fxc.graph_run import Role, placed
from fxc.graph_text import parse_graph

FILE = "computation_graph.py"
TABLE = "PLACEHOLDERS"
GATHERS = (torch.ops.aten.embedding.default,)
"""Ops that read some rows of their first argument."""


@dataclass(frozen=True)
class Graph:
    """One traced graph, read back from its text."""

    graph: fx.Graph
    roles: dict[str, Role]
    """By name of the placeholder in the text: ("input" | "weight" | "constant", name)."""
    text: str

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(draws(node) for node in self.graph.nodes)

    def gathered(self) -> dict[str, int]:
        """Weights of which only rows are looked up, as of an embedding, and by how many lookups."""
        found = {}
        for node in self.graph.find_nodes(op="placeholder"):
            role, name = self.roles[str(node.target)]
            users = [user for user in node.users if user.op == "call_function"]
            if role == "weight" and users and all(u.target in GATHERS and u.args[0] is node for u in users):
                found[name] = len(users)
        return found

    def module(self, held: Mapping[Role, torch.Tensor], device: torch.device) -> Eager:
        """
        Args:
            held: tensors that are kept from call to call; they are used as they are, not copied.
        """
        return Eager(self, held, device)


class Eager(nn.Module):
    """Called with the remaining inputs by name; returns what the graph does, a flat tuple."""

    def __init__(self, source: Graph, held: Mapping[Role, torch.Tensor], device: torch.device) -> None:
        super().__init__()
        graph = placed(source.graph, device)
        tensors = nn.Module()
        self.order: list[str] = []
        """Names of the inputs, in the order of the graph."""
        for index, node in enumerate(graph.find_nodes(op="placeholder")):
            role = source.roles[str(node.target)]
            if role[0] == "input" and role not in held:
                self.order.append(role[1])
                node.target = node.name  # an input called `torch` would hide it in the code that is made
                continue
            if node.users:
                _keep(tensors, f"held_{index}", held[role], parameter=role[0] == "weight")
                with graph.inserting_before(node):
                    node.replace_all_uses_with(graph.get_attr(f"held_{index}"))
            graph.erase_node(node)
        self.graph = fx.GraphModule(tensors, graph)

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.graph(*[inputs[name] for name in self.order])

    def compiled(self, mode: str | None) -> Callable[..., Any]:
        """The same by `torch.compile`, for the first shapes that it is called with. Imports Dynamo and Inductor."""
        # The function rather than the module: its code is this instance's own, so that shapes of others do not count
        # to the number of recompilations after which Dynamo gives up.
        call = torch.compile(self.graph.forward, dynamic=False, mode=mode)

        def run(**inputs: torch.Tensor) -> Any:
            if mode is not None:  # results of the call before are not needed any more
                torch.compiler.cudagraph_mark_step_begin()
            return call(*[inputs[name] for name in self.order])

        return run


def _keep(module: nn.Module, name: str, tensor: torch.Tensor, *, parameter: bool) -> None:
    if parameter:
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(name, tensor)


def graphs(artifact: Artifact) -> dict[str, Graph]:
    """The traced graphs of an artifact, by name of the step; all ranks of one artifact have the same. The ops that they
    call must be registered.

    Raises:
        DamagedError: the file is not as it was written.
        RunError: it was written by a release whose graphs do not say which weight is which.
    """
    name = f"{min(artifact.manifest.ranks, default='rank_0_0')}/{FILE}"
    text = artifact.read(name).decode()
    try:
        return dict(_parse(text))
    except _Unnamed:
        raise RunError(
            f"{artifact.path / name} does not say which weight is which: it was built by an earlier release",
            "build it again: fxc build --force",
        ) from None
    except (SyntaxError, AttributeError, AssertionError, KeyError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DamagedError(f"{artifact.path / name} cannot be read back: {what}", "run `fxc build --force`") from error


class _Unnamed(Exception):  # noqa: N818  told as a RunError
    """There is no table of placeholders."""


def _parse(text: str) -> Iterator[tuple[str, Graph]]:
    body = ast.parse(text).body
    tables: list[Any] = [
        ast.literal_eval(statement.value)
        for statement in body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == TABLE
    ]
    if not tables:
        raise _Unnamed
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            source = ast.get_source_segment(text, statement) or ""
            yield statement.name, Graph(parse_graph(source)[0], tables[0][statement.name], source)
