"""Every private name of torch that building uses, and nothing else. Checked with 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from fxc import kernel_choice
from fxc.host_compiler import HostCompiler
from fxc.machine import compiler_version
from fxc.target import Target

OpOverload = torch._ops.OpOverload
"""An op with its overload: `torch.ops.aten.add.Tensor`."""
TO_COPY = torch.ops.aten._to_copy.default
SCALED_MM = torch.ops.aten._scaled_mm.default
python_dispatcher = enable_python_dispatcher
"""A context in which ops that are written in terms of others are, in Python, as symbols want it."""


def is_own_file(file: str) -> bool:
    """Whether a source file is torch's or fxc's, rather than the model's."""
    return file.startswith((_TORCH, _FXC, "<"))


_TORCH = str(Path(torch.__file__).parent) + os.sep
_FXC = str(Path(__file__).parent) + os.sep


def schema(op: Any) -> Any:
    """Names, types and aliases of an op's arguments and results."""
    return op._schema


def overload(op: Any) -> str:
    """`Tensor` of `aten::add.Tensor`; empty for the default one."""
    return str(op._overloadname)


def has_effect(op: Any) -> bool:
    """Whether the op does more than compute its results: it writes into an argument, or has no result at all."""
    schema = op._schema
    return bool(schema.is_mutable) or (not schema.returns and not op.namespace.startswith(("aten", "prim")))


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters, those of submodules left out: to look at, and to replace without its hooks."""
    return module._parameters


def buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Its own buffers, likewise."""
    return module._buffers


def plain_values(module: nn.Module) -> Iterator[Any]:
    """Its own non-persistent buffers, and what plain attributes hold."""
    yield from (module._buffers.get(name) for name in module._non_persistent_buffers_set)
    yield from (value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules"))


def draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers. Attention says that it may, and does so for its dropout only."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(schema(node.target).arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool(argument.default_value if given is None else given)
    return True


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have shape, dtype and device but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def unflatten(values: list[Any], spec: Any) -> Any:
    """Put `values` back into the structure that torch.export recorded."""
    return _pytree.tree_unflatten(values, spec)


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """The same structure with what the function makes of its leaves."""
    return _pytree.tree_map(function, structure)


def expression(size: Any) -> sympy.Expr | None:
    """The sympy expression of a symbolic integer, None for a plain one."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None


def render(expr: sympy.Expr, names: Mapping[str, str]) -> str:
    """A size as Python source with dimension names for symbols."""
    renamed = expr.xreplace(
        {s: sympy.Symbol(names[s.name], integer=True, positive=True) for s in expr.free_symbols if s.name in names}
    )
    return str(PythonPrinter().doprint(renamed))


def same_memory(left: Any, right: Any) -> bool:
    """Whether two fake tensors, or the first of a list of them, lie on one storage."""
    tensors = [value[0] if isinstance(value, (list, tuple)) and value else value for value in (left, right)]
    return all(isinstance(tensor, torch.Tensor) for tensor in tensors) and (
        tensors[0].untyped_storage()._cdata == tensors[1].untyped_storage()._cdata
    )


# --- compiling ------------------------------------------------------------------------------------------------


class Symbols:
    """Fake tensors whose sizes are named dimensions, each a range with a hint or one value."""

    def __init__(self, dims: Mapping[str, tuple[int, int, int]]) -> None:
        """`dims`: name -> (lowest, highest, hint)."""
        from torch._dynamo.source import ConstantSource

        self.shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        self.values: dict[str, Any] = {}
        for name, (low, high, hint) in dims.items():
            if low == high:
                self.values[name] = low
                continue
            source = ConstantSource(name)
            symbol = self.shape_env.create_symbol(
                hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None, do_not_specialize_zero_one=True
            )
            self.shape_env.var_to_range[symbol] = ValueRanges(low, high)
            self.values[name] = self.shape_env.create_symintnode(symbol, hint=hint, source=source)

    def tensor(self, shape: list[Any], stride: list[Any] | None, dtype: torch.dtype, device: str) -> torch.Tensor:
        with self.mode:
            if stride is None:
                return torch.empty(shape, dtype=dtype, device=device)
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def assumptions(self) -> list[str]:
        """What the compiler took for granted about the dimensions, as text."""
        return [str(guard.expr) for guard in self.shape_env.guards]


def compile_graph(
    module: fx.GraphModule, inputs: tuple[torch.Tensor, ...], options: Mapping[str, Any], target: Target, *,
    scratch: Path, fast: bool,
) -> Path:  # fmt: skip
    """Compile with AOTInductor, weights being inputs. Changes the process: for one that does nothing else.

    Args:
        options: Inductor's configuration.
        target: what the binary is for.
        scratch: lasting directory for what the host compiler can share among pieces.
        fast: whether to make what is missing there.

    Returns:
        Path of the shared library; a custom op called from inside leaves `<stem>.json` beside it.
    """
    import torch._inductor
    from torch._inductor import cpp_builder, cpu_vec_isa
    from torch._inductor.codegen import cpp_wrapper_cpu

    interface = Path(cpp_wrapper_cpu.__file__).parent / "aoti_runtime" / "interface.cpp"
    host = HostCompiler(
        cpp_builder.run_compile_cmd, interface.read_text() if interface.exists() else "\0", scratch, fast,
        f"{torch.__version__} {torch.__file__} {compiler_version()}", target.march,
    )  # fmt: skip
    cpp_builder.run_compile_cmd = host
    if target.device == "cuda":
        _keep_registers()
        kernel_choice.watch(heuristics, required="autotune_lookup_table" in options)
    # Inductor asks whether the compiler knows an extension by loading what it makes in a new Python that imports torch:
    # seconds for each, and the CPU was asked already.
    cpu_vec_isa.VecISA.check_build = lambda self, code: host.accepts(self.build_arch_flags().split(), code)  # type: ignore[method-assign]
    return Path(str(torch._inductor.aot_compile(module, inputs, options={**options})))


def _keep_registers() -> None:
    """Inductor drops the limit on registers that a user's kernel asks for; ours names it as a constant, too."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original = CachingAutotuner._create_compile_options

    def options(self: Any, config: Any, meta: Any) -> Any:
        made = original(self, config, meta)
        if registers := meta["constants"].get("REGISTERS"):
            made["maxnreg"] = registers
        return made

    CachingAutotuner._create_compile_options = options  # type: ignore[method-assign, assignment]


@functools.cache
def heuristics() -> Any:
    """Inductor's module that makes Triton's kernels, which `kernel_choice` looks into. Checked once, before any of it
    is changed.

    Raises:
        IncompatibleError: names what it lacks of what is used there.
    """
    from torch._inductor.runtime import triton_heuristics

    writer = importlib.util.find_spec("torch._inductor.codegen.triton")
    kernel_choice.require(triton_heuristics, Path(writer.origin).read_text() if writer and writer.origin else "")
    return triton_heuristics


def compiled_kernels() -> Iterator[dict[str, Any]]:
    """Every kernel that this process has compiled: `name`, `cubin`, `warps`, `shared` (bytes that a launch asks for),
    `chosen` and `hash` as of `Choice`."""
    from torch._inductor.codecache import CudaKernelParamCache

    for key, params in CudaKernelParamCache.cache.items():
        yield {
            "name": str(params["mangled_name"]),
            "cubin": Path(str(params["cubin_path"])),
            "warps": int(params["num_warps"]),
            "shared": int(params["shared_mem"]),
            **kernel_choice.choice(key)._asdict(),
        }


_PRELOADED = (
    "torch._dynamo.source", "torch._inductor.codegen.cpp_wrapper_cpu", "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.cuda_combined_scheduling", "torch._inductor.compile_fx", "torch._inductor.cpp_builder",
    "torch._inductor.fx_passes.freezing_patterns", "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.joint_graph", "torch._inductor.fx_passes.pad_mm", "torch._inductor.fx_passes.post_grad",
    "torch._inductor.fx_passes.quantization", "torch._inductor.graph", "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.scheduler", "torch.export._trace", "triton",
)  # fmt: skip


def preload() -> None:
    """Import what compiling needs, before processes are forked. What a release of torch lacks is left out."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from torch._inductor.fx_passes import serialized_patterns

        for module in pkgutil.iter_modules(serialized_patterns.__path__):
            importlib.import_module(f"{serialized_patterns.__name__}.{module.name}")


def integer(value: int) -> sympy.Integer:
    return sympy.Integer(value)


# --- a GPU that is not there: checked with 2.11 and 2.14 ------------------------------------------------------


_VALUES: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""By id of a fake tensor: itself, so that the id stays its own, and the tensor whose values it stands for."""
_pretended: list[FakeTensorMode] = []
"""The mode that stands for the device's memory, in a process that has become one with a GPU."""


def device_attributes() -> frozenset[str]:
    """What this torch tells of a GPU, by name; nothing where it is built without CUDA."""
    described = getattr(torch._C, "_CudaDeviceProperties", None)
    return frozenset(name for name in dir(described) if not name.startswith("_")) if described else frozenset()


def become_cuda(properties: Any) -> None:
    """Make this process one whose only GPU has `properties`, for everything that compiles; nothing can run on it, and
    there is no way back.

    torch and Inductor take a device's facts from three places: the device interface, the code that generated Python
    runs to choose a device, and functions of torch.cuda. The first two can be registered, the last are replaced.
    """
    from torch._dynamo import device_interface
    from torch._inductor.codegen import common
    from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    capability = (properties.major, properties.minor)
    facts: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }

    class Worker:
        set_device = staticmethod(facts["set_device"])
        current_device = staticmethod(facts["current_device"])
        get_device_properties = staticmethod(facts["get_device_properties"])

    interface = type("Interface", (device_interface.CudaInterface,), {
        **{name: staticmethod(call) for name, call in facts.items()},
        "Worker": Worker,
        "exchange_device": staticmethod(lambda device: 0),
        "get_compute_capability": staticmethod(lambda device=None: capability[0] * 10 + capability[1]),
        "get_raw_stream": staticmethod(no_stream),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "maybe_exchange_device": staticmethod(lambda device: 0),
        "memory_allocated": staticmethod(lambda device=None: 0),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
    })  # fmt: skip
    list(device_interface.get_registered_device_interfaces())  # registers torch's own, which would come later
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, interface)

    class Overrides(CUDADeviceOpOverrides):
        def import_get_raw_stream_as(self, name: str) -> str:
            return f"from {__name__} import no_stream as {name}"

        def set_device(self, device_idx: int) -> str:
            return "None"

        def synchronize(self) -> str:
            return "None"

        def device_guard(self, device_idx: int) -> str:
            return "__import__('contextlib').nullcontext()"

    class Wrapper(CppWrapperGpu):
        @staticmethod
        def create(*args: Any, **options: Any) -> Any:
            return Wrapper()

        def generate_and_run_autotune_block(self) -> None:  # its example tensors take no memory
            with fake_mode():
                super().generate_and_run_autotune_block()  # type: ignore[no-untyped-call]

    common.get_device_op_overrides("cuda")
    common.register_device_op_overrides("cuda", Overrides())
    common.init_backend_registration()
    registered: Any = common.device_codegens["cuda"]
    registered.cpp_wrapper_codegen = Wrapper

    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    more: dict[str, Callable[..., Any]] = {
        "device": lambda device: contextlib.nullcontext(),
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "is_tf32_supported": lambda: capability >= (8, 0),
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "set_rng_state": lambda state, device=None: None,
    }
    for name, call in {**facts, **more}.items():
        setattr(torch.cuda, name, call)
    for cached in (value for value in vars(_triton).values() if hasattr(value, "cache_clear")):
        cached.cache_clear()  # asked before, when there was no GPU
    _pretended.append(fake_mode())


def no_stream(device: int = 0) -> int:
    """What Inductor's generated Python takes for the current stream."""
    return 0


def on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on `device`: where that is not there, a fake one that `value` gives back."""
    if not _pretended or not device.startswith("cuda"):
        return tensor.to(device)
    with _pretended[0]:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    _VALUES[id(fake)] = (fake, tensor)
    return fake


def value(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or what a fake one of `on_device` was made of."""
    return _VALUES.get(id(tensor), (tensor, tensor))[1]
