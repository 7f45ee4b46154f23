"""Every private name of torch that is in use, read from the text of the three modules that may use them.

A new release that drops one, or changes what it takes, fails here by name, before anything fails in the middle of a
build.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxc import _torch_build, _torch_run
from tests.test_boundaries import PRIVATE_TORCH, TREES, imports, is_private, torch_names

OPTIONAL = {
    "torch._inductor.fx_passes.freezing_patterns", "torch._inductor.fx_passes.serialized_patterns",
    "torch._inductor.codegen.cuda_combined_scheduling",
}  # fmt: skip
"""Only imported ahead of time, or looked for: a build does without them."""


def used(module: str) -> set[str]:
    found = {name for _, name in (*imports(TREES[module]), *torch_names(TREES[module])) if is_private(name)}
    return {name for name in found if name.startswith("torch.")} - OPTIONAL


def reach(name: str) -> Any:
    """The object that a dotted name stands for; modules on the way are imported."""
    value: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            try:
                value = importlib.import_module(path)
                continue
            except ImportError:
                pytest.fail(f"torch {torch.__version__} has no {name}: see where fxc/_torch_*.py uses it")
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(set().union(*map(used, PRIVATE_TORCH))))
def test_a_private_name_is_there(name: str) -> None:
    reach(name)


@pytest.mark.parametrize("name", _torch_run.NAMES)
def test_a_name_that_is_looked_up_at_load_is_there(name: str) -> None:
    assert _torch_run.find(name) is not None, f"torch {torch.__version__} has no {name}, which loading needs"


def test_what_tuning_looks_up_is_there() -> None:
    assert _torch_build.heuristics().CachingAutotuner


SIGNATURES: dict[str, tuple[str, ...]] = {
    "torch._inductor.aot_compile": ("gm", "args", "options"),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("allow_non_fake_inputs", "shape_env"),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol": (
        "val", "source", "dynamic_dim", "constraint_dim", "do_not_specialize_zero_one",
    ),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode": ("sym", "hint", "source"),
    "torch._inductor.cpp_builder.run_compile_cmd": ("cmd_line", "cwd"),
    "torch._inductor.cpu_vec_isa.VecISA.check_build": ("self", "code"),
    "torch.utils._pytree.tree_unflatten": ("leaves", "treespec"),
    "torch._dynamo.source.ConstantSource": ("source_name",),
    "torch.utils._sympy.value_ranges.ValueRanges": ("lower", "upper"),
    "torch.export.export": (
        "mod", "args", "kwargs", "dynamic_shapes", "strict", "prefer_deferred_runtime_asserts_over_guards",
    ),
}  # fmt: skip
"""What is passed to what."""


def parameters(target: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(target).parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_it_takes_what_it_is_given(name: str) -> None:
    found = parameters(reach(name))
    missing = [parameter for parameter in SIGNATURES[name] if parameter not in found]
    if missing and "kwargs" not in found and "args" not in found:
        pytest.fail(f"{name} of torch {torch.__version__} takes {sorted(found)}, fxc passes {missing}")


def test_attributes_of_private_objects() -> None:
    environment = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    assert environment.guards == []
    assert hasattr(environment, "var_to_range")
    schema = torch.ops.aten.add_.Tensor._schema
    assert (schema.name, schema.is_mutable, torch.ops.aten.add_.Tensor._overloadname) == ("aten::add_", True, "Tensor")
    first, result = schema.arguments[0], schema.returns[0]
    assert first.alias_info is not None
    assert result.alias_info is not None
    assert first.alias_info.is_write
    assert first.alias_info.before_set == result.alias_info.before_set
    assert torch.ops.aten.add_.Tensor.namespace == "aten"
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.rand.default.tags


def test_storages_can_be_told_apart() -> None:
    x = torch.ones(4)
    assert _torch_build.same_memory(x, x[1:])
    assert _torch_build.same_memory(x, [x[1:], x])
    assert not _torch_build.same_memory(x, x.clone())
    assert not _torch_build.same_memory(x, None)


def test_inductor_has_the_options_that_are_set() -> None:
    from torch._inductor import config

    from fxc.inductor_options import options
    from tests.building import target

    known = set(config.get_config_copy())
    for level in (1, 2, 3):
        unknown = set(options(level, True, target())) - known
        assert not unknown, f"torch._inductor.config of torch {torch.__version__} has no {sorted(unknown)}"


def test_the_entry_points_of_a_binary_are_where_they_were() -> None:
    """`HostCompiler` splits Inductor's C++ at this text; without it builds are right but slow."""
    from torch._inductor.codegen import cpp_wrapper_cpu

    interface = Path(str(cpp_wrapper_cpu.__file__)).parent / "aoti_runtime" / "interface.cpp"
    assert re.search(r"AOTInductorModelContainerCreate", interface.read_text())


def test_names_are_read_from_the_text() -> None:
    assert "torch._ops.OpOverload" in used("fxc._torch_build")
    assert isinstance(TREES["fxc._torch_build"], ast.Module)
