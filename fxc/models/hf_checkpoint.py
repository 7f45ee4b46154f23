"""Names under which a checkpoint keeps the weights of a transformers model, where they are not the module's own.

Two things differ: mixture-of-experts layers are written expert by expert and are stacked when transformers loads them,
and an encoder may come out of a checkpoint of a whole model, with a prefix. A server binds checkpoints without
transformers, so what has to be done is found out at build time and goes into the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from fxc.models.source import StoredName


def stored_names(module: nn.Module) -> dict[str, StoredName]:
    """By name of the module's own, for weights that checkpoints may keep under another one or in parts."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(module, add_legacy=False)  # type: ignore[arg-type]
    converters = [transform for transform in transforms if _stacks(transform)]
    renamings = [transform for transform in transforms if _renames(transform)]
    prefix = getattr(module, "base_model_prefix", "")
    prefix = "" if not prefix or hasattr(module, prefix) else f"{prefix}."
    found = {}
    for name in module.state_dict():
        parts = _before(_parts(name, converters), renamings)
        (renamed,) = _before((name,), renamings)
        aliases: tuple[str, ...] = (renamed,) if renamed != name else ()
        if prefix:
            aliases += (prefix + renamed,)
        if aliases or parts:
            found[name] = StoredName(aliases, parts)
    return found


def _stacks(transform: Any) -> bool:
    """Whether it stacks what `*` counts and concatenates the stacks along the next dimension, into one weight."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in getattr(transform, "operations", ())]
    known = steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
    return known and len(transform.target_patterns) == 1 and _plain(transform)


def _renames(transform: Any) -> bool:
    return type(transform).__name__ == "WeightRenaming" and len(transform.source_patterns) == 1 and _plain(transform)


def _plain(transform: Any) -> bool:
    """Whether its patterns are text, apart from `*`: a regular expression cannot be followed backwards."""
    patterns = (*transform.source_patterns, *transform.target_patterns)
    return all(re.fullmatch(r"[\w.*]+", pattern) for pattern in patterns)


def _parts(name: str, converters: Iterable[Any]) -> tuple[str, ...]:
    for converter in converters:
        (target,) = converter.target_patterns
        if name.endswith(target):
            return tuple(name.removesuffix(target) + source for source in converter.source_patterns)
    return ()


def _before(names: tuple[str, ...], renamings: Iterable[Any]) -> tuple[str, ...]:
    """The names that loading would rename to `names`."""
    for renaming in renamings:
        (old,), (new,) = renaming.source_patterns, renaming.target_patterns
        names = tuple(name.replace(new, old) for name in names)
    return names
