"""The weights of a model: names, ties, and memory that some of them share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

import msgspec
import torch

from fxc.errors import TraceError
from fxc.manifest import Weight
from fxc.models import stored_names
from fxc.traced import Traced


def find(model: torch.nn.Module) -> tuple[dict[str, Weight], set[str]]:
    """Parameters and persistent buffers by canonical name, tied ones once; and all names."""
    found: dict[str, Weight] = {}
    by_identity: dict[int, str] = {}
    persistent = model.state_dict(keep_vars=True)
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            if name not in persistent:
                continue
            first = by_identity.setdefault(id(tensor), name)
            if first != name:
                found[first] = msgspec.structs.replace(found[first], aliases=(*found[first].aliases, name))
                continue
            found[name] = Weight(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                buffer=kind == "buffer",
            )
    stored = stored_names(model)
    for name in found.keys() & stored.keys():
        aliases = (*found[name].aliases, *stored[name].aliases)
        found[name] = msgspec.structs.replace(found[name], aliases=aliases, parts=stored[name].parts)
    return found, {*persistent, *(alias for entry in stored.values() for alias in entry.aliases)}


class Shared(NamedTuple):
    """Two names of a model for the same memory, or for some of it, that are apart in the graph."""

    names: tuple[str, str]
    one: bool
    """One tensor under a persistent and another name, of which the graph has either."""


def shared(model: torch.nn.Module) -> list[Shared]:
    """Buffers and parameters that overlap. A tied weight, one tensor under two names, is one in the graph too."""
    persistent = model.state_dict(keep_vars=True)
    first: dict[tuple[bool, int], str] = {}
    by_storage: dict[torch.UntypedStorage, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if tensor.layout == torch.strided and first.setdefault((name in persistent, id(tensor)), name) == name:
            by_storage.setdefault(tensor.untyped_storage(), []).append((name, tensor))
    pairs = (pair for group in by_storage.values() for pair in combinations(group, 2))
    return [Shared((name, other), a is b) for (name, a), (other, b) in pairs if _overlap(a, b)]


def _overlap(tensor: torch.Tensor, twin: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if tensor.element_size() != twin.element_size():
        return True
    if tensor.is_contiguous() and twin.is_contiguous():
        low, high = sorted((tensor, twin), key=torch.Tensor.storage_offset)
        return bool(low.numel() and twin.numel()) and low.storage_offset() + low.numel() > high.storage_offset()
    seen = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool)
    seen.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return bool(seen.as_strided(twin.shape, twin.stride(), twin.storage_offset()).any())


def check_shared(shared: Iterable[Shared], traces: Iterable[Traced]) -> None:
    """Compiled code takes every buffer for a separate tensor: what is written into one would not show in another.

    Raises:
        TraceError: a graph writes into one of two that share memory.
    """
    for traced in traces:
        roles = [node.meta["role"] for node in traced.graph.find_nodes(op="placeholder") if node.users]
        read = {name for role, name in roles if role != "input"}
        for names, one in shared:
            written = [name for name in names if name in read & traced.mutated]
            if written and (one or read.issuperset(names)):
                other = names[written[0] == names[0]]
                raise TraceError(
                    f"the model writes into the buffer {written[0]}, which shares memory with {other}",
                    "make them separate tensors: clone one before it is registered",
                )
