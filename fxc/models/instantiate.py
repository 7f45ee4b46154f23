"""A module whose parameters are on the meta device: as much of a 70B model as a trace needs, in little memory and time.

Parameters move to the meta device the moment they are registered, so initialising them is free. Buffers are real:
their values may be part of the graph. Where that does not work out (code that reads its parameters while it
constructs, a non-persistent buffer computed from one) the module is constructed for real, and then stripped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from fxc import _torch_build as private
from fxc.models.source import ModelSource

LARGE = 1 << 20
"""Elements from which on a tensor of unset or random values is made on the meta device. Smaller ones cost nothing."""

_TWIN = "_fxc_meta_twin"
"""Attribute of a parameter that was replaced: what replaced it, so that tied weights stay tied."""


def instantiate(source: ModelSource) -> nn.Module:
    """Construct the model in eval mode, without gradients, parameters on the meta device, buffers real.

    A persistent buffer may be left on the meta device (its value is bound at load), a non-persistent one has its value.
    `ModelSource.dtype` is applied as `module.to(dtype)` does it: to floating-point parameters and to all floating-point
    buffers, non-persistent ones included, so that results equal those of that eager module.

    Raises:
        SpecError: the target cannot be constructed, or does not take the inputs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # initialising a meta tensor warns that it does nothing
        module = _without_weights(source.make)
    if module is None:
        module = source.make()
        _strip(module)
    if source.dtype is not None:
        module.to(getattr(torch, source.dtype))
    module.eval().requires_grad_(False)
    source.prepare(module)
    return module


def _without_weights(make: Callable[[], nn.Module]) -> nn.Module | None:
    """`make()` with parameters on the meta device from the start; None when that fails or loses a value."""
    handle = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]  # may return a parameter
    try:
        with _LargeOnMeta():
            module = make()
    except Exception:
        return None  # what is wrong with the model itself is raised again, better, by the real construction
    finally:
        handle.remove()
    return None if any(value.is_meta for value in _needed(module)) else module


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Registration hook: the meta parameter to register instead of `parameter`."""
    if type(parameter) is not nn.Parameter or parameter.is_meta:  # a subclass may hold more than its values
        return None
    twin: nn.Parameter | None = getattr(parameter, _TWIN, None)
    if twin is None:
        twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        setattr(parameter, _TWIN, twin)
    return twin


def _strip(module: nn.Module) -> None:
    """Move the parameters of a real module to the meta device."""
    for owner in module.modules():
        parameters = private.parameters(owner)
        for name, parameter in parameters.items():
            if parameter is not None:
                replaced = _to_meta(owner, name, parameter)
                parameters[name] = parameter if replaced is None else replaced


def _needed(module: nn.Module) -> Iterable[Tensor]:
    """The tensors whose values belong to the program: non-persistent buffers, and tensors in plain attributes."""
    for owner in module.modules():
        for value in private.plain_values(owner):
            yield from _tensors(value)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, Tensor))
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, Tensor))


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors of unset or random values on the meta device: nobody reads those of a weight."""

    FACTORIES = frozenset({torch.empty, torch.empty_like, torch.rand, torch.rand_like, torch.randn, torch.randn_like})

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.FACTORIES and kwargs.get("device") is None and "out" not in kwargs:
            rest = {name: value for name, value in kwargs.items() if name not in ("device", "generator")}
            made = func(*args, **rest, device="meta")
            if made.numel() >= LARGE:
                return made
        return func(*args, **kwargs)
