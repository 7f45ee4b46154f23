"""`model.target`: FILE.py:NAME or package.module:NAME, a class or factory that returns an nn.Module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxc.convert import nearest, suggest
from fxc.errors import FxcError, SpecError
from fxc.imports import importable
from fxc.models.files import load_file
from fxc.models.source import ModelSource
from fxc.spec import InputSpec, ModelSpec, Spec


def resolve_target(spec: Spec, directory: Path) -> ModelSource:
    """Import the target and check its arguments; constructs nothing yet."""
    place, _, name = str(spec.model.target).rpartition(":")
    check_dtype(spec.model)
    module, imports = _import(place, directory)
    target = _attribute(module, name, place)
    _check_args(target, spec.model.args, name)

    def make() -> nn.Module:
        with importable(directory):
            made = _call(target, spec.model.args, name)
        check_inputs(made, spec.inputs)
        return made

    file = getattr(module, "__file__", None)
    return ModelSource(
        name=name.rpartition(".")[2],
        inputs=spec.inputs,
        dims=spec.dims,
        make=make,
        dtype=spec.model.dtype,
        imports=imports,
        sources=(Path(file).resolve(),) if file else (),
    )


def check_inputs(module: nn.Module, inputs: Mapping[str, InputSpec]) -> None:
    """Every input is an argument of forward, and every argument of forward without default is an input."""
    parameters = inspect.signature(module.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    owner = type(module).__name__
    for name in inputs:
        if name not in named and not open_ended:
            raise SpecError(f"inputs.{name}: forward of {owner} does not take it", suggest(name, named, "it takes"))
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in inputs:
            raise SpecError(f"inputs: forward of {owner} needs {name!r}", f"add `{name}: {{shape: [...], dtype: ...}}`")


def check_dtype(model: ModelSpec) -> None:
    """`model.dtype` must be one that a module can be cast to."""
    if model.dtype is not None and not getattr(torch, model.dtype).is_floating_point:
        raise SpecError(f"model.dtype: {model.dtype} is not a floating-point dtype", "use float32, bfloat16 or float16")


def _import(place: str, directory: Path) -> tuple[ModuleType, tuple[str, ...]]:
    """The module a target lies in, and its name as `ModelSource.imports` has it."""
    try:
        if not place.endswith(".py"):
            with importable(directory):
                return importlib.import_module(place), (place,)
        path = directory / place
        if not path.is_file():
            raise SpecError(f"model.target: {path} does not exist", "the path is relative to model.yaml")
        return load_file(path), (Path(place).as_posix(),)
    except FxcError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            hint = "install it, or write FILE.py:NAME with a path relative to model.yaml"
            raise SpecError(f"model.target: there is no module {error.name!r}", hint) from error
        raise SpecError(f"model.target: {place} needs a module that is missing: {error.name}", "install it") from error
    except Exception as error:
        raise SpecError(
            f"model.target: {place} cannot be imported: {describe(error)}", "see the traceback with -v"
        ) from error


def _attribute(module: ModuleType, name: str, place: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = nearest(part, [key for key in vars(found) if not key.startswith("_")])
            raise SpecError(f"model.target: {place} has no {name!r}", f"did you mean {near!r}?" if near else "")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, nn.Module):
        hint = "name a class, or a function that returns an nn.Module"
        raise SpecError(f"model.target: {name} in {place} is {_a(found)}, not callable", hint)
    target: Callable[..., Any] = found
    return target


def _check_args(target: Callable[..., Any], args: dict[str, Any], name: str) -> None:
    """`args` must fit the target's signature, where it has one."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for key in args:
            if key not in takes:
                raise SpecError(f"model.args.{key}: {name} does not take it", suggest(key, takes, "it takes"))
    try:
        signature.bind(**args)
    except TypeError as error:
        raise SpecError(f"model.args: {name}: {error}", f"its signature is {name}{signature}") from None


def _call(target: Callable[..., Any], args: dict[str, Any], name: str) -> nn.Module:
    try:
        made = target(**args)
    except FxcError:
        raise
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise SpecError(
            f"model.target: {name}({shown}) raised {describe(error)}", "see the traceback with -v"
        ) from error
    if not isinstance(made, nn.Module):
        raise SpecError(f"model.target: {name} returned {_a(made)}, not an nn.Module")
    return made


def describe(error: BaseException) -> str:
    """An exception on one line, with the place in the user's code that raised it where there is one."""
    text = " ".join(str(error).split())
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):
        return shown
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{shown} ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else shown


def _a(value: object) -> str:
    word = type(value).__name__
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"
