"""Every private torch name that a loaded program uses, checked before use. The build's are in `_torch_build`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from fxc.errors import IncompatibleError

CPU_RUNNER = "torch._C._aoti.AOTIModelContainerRunnerCpu"
CUDA_RUNNER = "torch._C._aoti.AOTIModelContainerRunnerCuda"
SET_GRAD = "torch._C._set_grad_enabled"
OPDEFS = "torch._library.custom_ops.OPDEFS"
DISPATCH_DUMP = "torch._C._dispatch_dump"

STORAGE = "torch._C._construct_storage_from_data_pointer"
COPY = "torch._foreach_copy_"
BEGIN_POOL = "torch._C._cuda_beginAllocateCurrentThreadToPool"
END_POOL = "torch._C._cuda_endAllocateToPool"
RELEASE_POOL = "torch._C._cuda_releasePool"
CLEAR_CUBLAS = "torch._C._cuda_clearCublasWorkspaces"

NAMES = (CPU_RUNNER, SET_GRAD, OPDEFS, DISPATCH_DUMP, STORAGE, COPY)
"""What every torch must have."""
CUDA_NAMES = (CUDA_RUNNER, BEGIN_POOL, END_POOL, RELEASE_POOL, CLEAR_CUBLAS)
"""What builds with CUDA must have."""

Piece = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""A compiled piece: tensors in, tensors out, in the order of its graph."""

_MARK = "__dynamo_disable"
"""Attribute where `torch._disable_dynamo` keeps the wrapped function once Dynamo has been imported."""


def find(name: str) -> Any:
    """The object with the dotted `name` below torch; None where this torch has none."""
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def require(name: str) -> Any:
    """The object with the dotted `name` below torch.

    Raises:
        IncompatibleError: this torch has none.
    """
    found = find(name)
    if found is None:
        built = "" if torch.version.cuda or name not in CUDA_NAMES else ", a build without CUDA,"
        raise IncompatibleError(
            f"torch {torch.__version__}{built} has no {name}, which fxc needs to run compiled pieces",
            "install a torch release that fxc supports (2.11 or later)",
        )
    return found


def runner(path: Path, device: torch.device) -> Piece:
    """Map a binary into the process. One instance of the model inside: calls from several threads take turns on cpu;
    on cuda they must not overlap, because the single-threaded mode that graph capture needs has no lock.

    Raises:
        IncompatibleError: the dynamic linker or torch refuses it.
    """
    make = require(CUDA_RUNNER if device.type == "cuda" else CPU_RUNNER)
    rest = (str(device), "", True) if device.type == "cuda" else ()
    # Making one leaves its device the current one of the thread, which is the caller's to choose.
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with current:
            return cast(Piece, make(str(path), 1, *rest).run)
    except (RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise IncompatibleError(
            f"{path} cannot be loaded with torch {torch.__version__}: {reason}", "build it again on this machine"
        ) from error


def grad_switch() -> Callable[[bool], None]:
    """What `torch.no_grad` calls; by itself it costs a tenth of the context manager, which counts in a 3 µs call."""
    return cast(Callable[[bool], None], require(SET_GRAD))


def quiet_custom_ops(names: Iterable[str]) -> None:
    """Keep the first call of each op from importing Dynamo, Inductor, sympy and triton: seconds, in a request.

    Kernels of `torch.library.custom_op` (and `register_kernel`) are wrapped by `torch._disable_dynamo`, which imports
    Dynamo at the first call to have its tracer look away. Without Dynamo in the process nothing traces, so the bare
    kernel is put where the wrapper looks first, until somebody else imports Dynamo. Where the wrapper cannot be
    reached, Dynamo is imported here: at load, never in a request.
    """
    if "torch._dynamo" in sys.modules:
        return
    if not all(_quiet(name) for name in names):
        importlib.import_module("torch._dynamo")


def _quiet(name: str) -> bool:
    """Whether the op's first call now imports nothing."""
    definition = (find(OPDEFS) or {}).get(name)
    if definition is None:
        # Not from `custom_op`. A kernel that torch/library.py registered on the user's behalf may be a wrapped one.
        dump = find(DISPATCH_DUMP)
        return dump is not None and "torch/library.py" not in dump(name)
    kernels = getattr(definition, "_backend_fns", None)
    return isinstance(kernels, dict) and all(_defer(kernel) for kernel in kernels.values())


def _defer(kernel: Callable[..., Any]) -> bool:
    """Have the wrapper `kernel` run its function as it is while Dynamo is not imported; False where it is another."""
    bare = getattr(kernel, "__wrapped__", None)
    if bare is None or _MARK not in kernel.__code__.co_consts:
        return False

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return bare(*args, **kwargs)
        bare.__dict__.pop(_MARK, None)  # from now on as torch has it
        return kernel(*args, **kwargs)

    setattr(bare, _MARK, run)
    return True


def without_owner(value: Any) -> Any:
    """The same results, as tensors that do not keep their memory: for memory of a graph's pool, which others share."""
    return tree_map(_weak, value)


def _weak(tensor: torch.Tensor) -> torch.Tensor:
    storage = require(STORAGE)(tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def hold_pool(device: torch.device, handle: Any) -> Callable[[], None]:
    """Keep a memory pool while no graph is in it, as one that nobody holds cannot be used again; returns what ends
    that."""
    require(BEGIN_POOL)(device.index, handle)
    require(END_POOL)(device.index, handle)
    return partial(require(RELEASE_POOL), device.index, handle)


@contextlib.contextmanager
def pool(device: torch.device, handle: Any) -> Iterator[None]:
    """What the thread allocates inside comes out of a memory pool of CUDA graphs."""
    require(BEGIN_POOL)(device.index, handle)
    try:
        yield
    finally:
        require(END_POOL)(device.index, handle)
        require(RELEASE_POOL)(device.index, handle)


def clear_cublas_workspaces() -> None:
    """Have cuBLAS make its workspaces anew, where the thread then allocates."""
    require(CLEAR_CUBLAS)()


def copy_all(into: list[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Copy tensors of several dtypes, those of one dtype in one launch."""
    if into:
        find(COPY)(into, list(values))


def only_tensors(value: Any) -> bool:
    """Whether results are tensors and None in tuples, lists and dicts."""
    if isinstance(value, dict):
        return all(map(only_tensors, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(only_tensors, value))
    return value is None or isinstance(value, torch.Tensor)


def tree_map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor in its tuples, lists and dicts replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)((key, tree_map(change, item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(tree_map(change, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(tree_map(change, item) for item in value)
    return value


COMPILERS = ("torch._dynamo", "torch._inductor", "sympy", "triton")


def compilers_imported() -> list[str]:
    """Which of the compilers and what they bring along this process has imported: none for a loaded program."""
    return [name for name in COMPILERS if name in sys.modules]
