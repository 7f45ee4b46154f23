"""fxc: compiles PyTorch models for serving, ahead of time.

    result = fxc.build("model.yaml")
    program = fxc.load(result.hash, device="cuda:0")
    program.bind("model.safetensors")
    out = program(input_ids=ids, positions=positions)

Importing this imports neither torch nor a compiler; `load` imports torch, `build` the compiler too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fxc.errors import (
    BuildError,
    CacheIOError,
    CacheMissError,
    CompileError,
    DamagedError,
    FxcError,
    IncompatibleError,
    InputError,
    PassError,
    ProofError,
    RunError,
    SpecError,
    TraceError,
    UntrustedError,
    UsageError,
    WeightError,
)

if TYPE_CHECKING:
    from fxc.pipeline import BuildResult, build
    from fxc.progress import Observer
    from fxc.ready import WarmResult, warm
    from fxc.runtime import Program, load

__all__ = [
    "BuildError",
    "BuildResult",
    "CacheIOError",
    "CacheMissError",
    "CompileError",
    "DamagedError",
    "FxcError",
    "IncompatibleError",
    "InputError",
    "Observer",
    "PassError",
    "Program",
    "ProofError",
    "RunError",
    "SpecError",
    "TraceError",
    "UntrustedError",
    "UsageError",
    "WarmResult",
    "WeightError",
    "build",
    "load",
    "warm",
]

_LAZY = {
    "BuildResult": "fxc.pipeline",
    "build": "fxc.pipeline",
    "Observer": "fxc.progress",
    "Program": "fxc.runtime",
    "load": "fxc.runtime",
    "WarmResult": "fxc.ready",
    "warm": "fxc.ready",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fxc' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
