"""A model to build, wherever it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from fxc.spec import DimSpec, InputSpec, Spec


@dataclass(frozen=True)
class ModelSource:
    """What `resolve` found: everything about a model but the module itself."""

    name: str
    """For people: the target's class, or the Hugging Face architecture."""
    inputs: Mapping[str, InputSpec]
    """Arguments of forward, in order."""
    dims: Mapping[str, DimSpec]
    make: Callable[[], nn.Module]
    """Constructs the module. Call it through `instantiate`, which keeps weights out of memory."""
    dtype: str | None = None
    """Dtype to cast parameters and buffers to, as `module.to(dtype)` does; None when `make` sees to it."""
    imports: tuple[str, ...] = ()
    """What registers custom ops: `FILE.py` relative to model.yaml, or dotted modules."""
    sources: tuple[Path, ...] = ()
    """Files that define the model: the target's file, or config.json and the modeling code."""
    prepare: Callable[[nn.Module], None] = field(default=lambda module: None)
    """Called on the module once its parameters are on the meta device."""


def resolve(spec: Spec, directory: Path) -> ModelSource:
    """Find the model that `spec` names; `directory` is where model.yaml lies.

    Raises:
        SpecError: there is no such model, or it cannot be imported.
    """
    if spec.model.huggingface is not None:
        from fxc.models.huggingface import resolve_folder

        return resolve_folder(spec, directory)
    from fxc.models.target import resolve_target

    return resolve_target(spec, directory)


@dataclass(frozen=True)
class StoredName:
    """Where checkpoints keep a weight, if not under its own name."""

    aliases: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    """As in `Weight.parts` of the manifest."""


def stored_names(module: nn.Module) -> Mapping[str, StoredName]:
    """How checkpoints name weights of an instantiated module otherwise, by its own names."""
    found: Mapping[str, StoredName] = getattr(module, STORED_NAMES, {})
    return found


def expected_ops(module: nn.Module) -> dict[str, int]:
    """How many nodes of which op the exported graph of an instantiated module must have, by qualified name.

    Fewer means that a part of the model went another way than the op (it was swallowed, or the class has its own).
    Empty where nothing is known.
    """
    found = getattr(module, EXPECTED_OPS, None)
    return dict(found) if isinstance(found, Mapping) else {}


def cache_inputs(module: nn.Module) -> tuple[Mapping[str, InputSpec], Mapping[str, DimSpec]]:
    """Inputs that only the layers of an instantiated module tell of, the key/value caches, and their dimension."""
    found: tuple[Mapping[str, InputSpec], Mapping[str, DimSpec]] = getattr(module, CACHE_INPUTS, ({}, {}))
    return found


CACHE_INPUTS = "fxc_cache_inputs"
"""Attribute that `ModelSource.prepare` leaves on the module for `cache_inputs`."""
STORED_NAMES = "fxc_stored_names"
"""Attribute that `ModelSource.prepare` leaves on the module for `stored_names`."""
EXPECTED_OPS = "fxc_expected_ops"
"""Attribute that `ModelSource.prepare` leaves on the module for `expected_ops`."""
