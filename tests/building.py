"""Building models of the zoo without compiling, and comparing programs with eager."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree

from fxc import machine, prove
from fxc.plan import Plan, make_plan
from fxc.random_inputs import example_inputs
from fxc.runtime.loader import _factories
from fxc.runtime.program import Program
from fxc.spec import Spec, parse_spec
from fxc.target import Target
from tests.zoo.model import Model

HERE = Path(__file__).parent


@lru_cache
def target() -> Target:
    return machine.probe("cpu")


def zoo(module: ModuleType) -> list[type[Model]]:
    """The models of a module, in the order of its text."""
    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Model)]
    return [cls for cls in found if cls.__module__ == module.__name__]


def spec_of(cls: type[Model], **compile: Any) -> Spec:
    return parse_spec({**cls.spec(), "compile": {"level": 0, **compile}}, cls.__name__)


def plan_of(cls: type[Model], **compile: Any) -> Plan:
    return make_plan(spec_of(cls, **compile), HERE, target())


def program_of(plan: Plan) -> Program:
    """A level 0 plan as a program, without a cache."""
    namespace: dict[str, Any] = {}
    exec(plan.files["transformed_code.py"], namespace)
    constants: list[torch.Tensor] = []
    if plan.manifest.constants:
        import safetensors.torch

        tensors = safetensors.torch.load(plan.files["constants.safetensors"])
        constants = [tensors[constant.name] for constant in plan.manifest.constants]
    return Program(plan.manifest, torch.device("cpu"), _factories(plan.manifest, namespace, {}), constants)


def text_of(plan: Plan) -> str:
    return plan.files["transformed_code.py"].decode()


def make(cls: type[torch.nn.Module], seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return cls().eval().requires_grad_(False)


def check(cls: type[Model], program: Program, tolerance: float = 1e-5) -> None:
    """Run at all sizes of the model and compare everything with eager."""
    model = make(cls)
    program.bind(bound := copy.deepcopy(model))
    spec = spec_of(cls)
    for values in cls.calls:
        sizes = dict(zip(cls.dims, values, strict=True))
        inputs = example_inputs(spec.inputs, sizes, "cpu", torch.Generator().manual_seed(sum(values, 7)))
        compare(model, bound, program, inputs, f"{cls.__name__} at {sizes}", cls.seeded, tolerance)


def compare(
    model: torch.nn.Module, bound: torch.nn.Module, program: Program, inputs: Mapping[str, torch.Tensor], where: str,
    seeded: bool = False, tolerance: float = 1e-5,
) -> None:  # fmt: skip
    """Results, their structure and memory, and what was written into inputs and weights."""
    theirs = {name: tensor.clone() for name, tensor in inputs.items()}
    ours = {name: tensor.clone() for name, tensor in inputs.items()}
    if seeded:
        torch.manual_seed(99)
    want = model(**theirs)
    if seeded:
        torch.manual_seed(99)
    have = program(**ours)
    assert structure(have) == structure(want), where
    flat, found = _pytree.tree_leaves(want), _pytree.tree_leaves(have)
    for index, (a, b) in enumerate(zip(found, flat, strict=True)):
        if isinstance(b, torch.Tensor):
            close(a, b, f"{where}: result {index}", tolerance)
            assert prove.strides(a) == prove.strides(b), f"{where}: result {index}"
        else:
            assert (a, type(a)) == (b, type(b)), where
    for name in inputs:
        close(ours[name], theirs[name], f"{where}: {name} afterwards", tolerance)
    for (name, a), b in zip(bound.state_dict().items(), model.state_dict().values(), strict=True):
        close(a, b, f"{where}: {name} afterwards", tolerance)
    assert _shared(found, [*ours.values(), *bound.state_dict().values()]) == _shared(
        flat, [*theirs.values(), *model.state_dict().values()]
    ), f"{where}: results that share memory"


def structure(value: Any) -> Any:
    """What a result is made of, by names of types and keys."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return kind, [(key, structure(item)) for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return kind, getattr(value, "_fields", None), [structure(item) for item in value]
    return "Tensor" if isinstance(value, torch.Tensor) else kind


def close(have: Any, want: torch.Tensor, where: str, tolerance: float) -> None:
    assert isinstance(have, torch.Tensor), where
    assert (have.dtype, have.shape) == (want.dtype, want.shape), where
    torch.testing.assert_close(
        have, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


def _shared(results: Iterable[Any], given: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    """Per result, which of `given` and of the results before it share its memory."""
    tensors = [tensor.untyped_storage().data_ptr() for tensor in given]
    found = []
    for result in results:
        place = result.untyped_storage().data_ptr() if isinstance(result, torch.Tensor) and result.numel() else 0
        found.append(tuple(index for index, other in enumerate(tensors) if place and other == place))
        tensors.append(place)
    return found
