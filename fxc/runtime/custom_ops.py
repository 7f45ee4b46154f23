"""Makes sure that the ops outside aten which a program calls are registered, and that calling them imports nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from fxc import _torch_run
from fxc.errors import RunError
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
    if op.module.endswith(".py"):
        if directory is None:
            raise RunError(
                f"the program calls the op {op.name}, which is not registered; {op.module} registers it",
                f"import {op.module} before fxc.load, or load by the path of its model.yaml",
            )
        _run_file(directory / op.module, op)
        return
    try:
        importlib.import_module(op.module)
    except ImportError as error:
        raise RunError(
            f"the program calls the op {op.name}, and {op.module}, which registers it, cannot be imported: {error}",
            "install it on this machine",
        ) from error


def _run_file(path: Path, op: CustomOp) -> None:
    """Execute a file as a module that can import its neighbours; no bytecode of it is written."""
    name = f"_fxc_ops_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        reason = f"{type(error).__name__}: {error}"
        raise RunError(
            f"the program calls the op {op.name}, and {path}, which registers it, fails: {reason}"
        ) from error
    finally:
        sys.path.remove(str(path.parent))
