"""Makes sure that the ops outside aten which a program calls are registered, and that calling them imports nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch

from fxc import _torch_run
from fxc.errors import RunError
from fxc.imports import importable, module_name
from fxc.manifest import CustomOp


def prepare(ops: Sequence[CustomOp], directory: Path | None) -> None:
    """Register every op; `directory` is that of model.yaml, where the program was asked for by it.

    Raises:
        RunError: an op that nothing here registers.
    """
    for op in ops:
        if not registered(op.name):
            _import(op, directory)
            if not registered(op.name):
                raise RunError(f"importing {op.module} does not register the op {op.name}, which the program calls")
    ours = "fxc::"  # defined through torch.library.Library: nothing to quieten
    _torch_run.quiet_custom_ops([op.name for op in ops if not op.name.startswith(ours)])


def registered(name: str) -> bool:
    """Whether torch knows the op `namespace::op`."""
    namespace, _, op = name.partition("::")
    return hasattr(getattr(torch.ops, namespace), op)


def _import(op: CustomOp, directory: Path | None) -> None:
    what = f"the program calls the op {op.name}"
    is_file = op.module.endswith(".py")
    if not op.module or (is_file and directory is None):
        owner = op.module or "the module that defines it"
        hint = f"import {owner} before fxc.load" + (", or load by the path of its model.yaml" if is_file else "")
        raise RunError(f"{what}, which is not registered; {owner} registers it", hint)
    try:
        with nullcontext() if directory is None else importable(directory):
            if is_file and directory is not None:
                _run_file((directory / op.module).resolve())
            else:
                importlib.import_module(op.module)
    except Exception as error:
        raise RunError(
            f"{what}, and {op.module}, which registers it, cannot be imported: {type(error).__name__}: {error}",
            "make it importable on this machine",
        ) from error


def _run_file(path: Path) -> None:
    """Execute a file as a module, by the name that a build gives it; no bytecode of it is written."""
    module = ModuleType(module_name(path))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
