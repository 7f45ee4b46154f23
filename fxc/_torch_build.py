"""Every private name of torch that building uses, and nothing else. Checked with 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import contextlib
import importlib
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

from fxc.host_compiler import HostCompiler
from fxc.machine import compiler_version
from fxc.target import Target

OpOverload = torch._ops.OpOverload
"""An op with its overload: `torch.ops.aten.add.Tensor`."""
TO_COPY = torch.ops.aten._to_copy.default
SCALED_MM = torch.ops.aten._scaled_mm.default


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


def guards(graph: fx.Graph) -> Iterator[tuple[sympy.Expr, str]]:
    """Conditions that tracing took for granted, with the place in the model's source where known."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            shape_env = value.fake_mode.shape_env  # type: ignore[attr-defined]
            if shape_env is None:
                continue
            for guard in shape_env.guards:
                place = getattr(guard.sloc, "maybe_user_loc", None)
                yield guard.expr, str(place or "")
            # Not all of these become assertions in the graph.
            yield from ((item.expr, "") for items in shape_env.deferred_runtime_asserts.values() for item in items)
            return


def same_memory(left: Any, right: Any) -> bool:
    """Whether two fake tensors, or the first of a list of them, lie on one storage."""
    tensors = [value[0] if isinstance(value, (list, tuple)) and value else value for value in (left, right)]
    return all(isinstance(tensor, torch.Tensor) for tensor in tensors) and (
        tensors[0].untyped_storage()._cdata == tensors[1].untyped_storage()._cdata
    )


def failed_guards(error: BaseException | None) -> Iterator[str]:
    """FILE:LINE in the model for every condition on sizes that an export assumed before it raised `error`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            for value in trace.tb_frame.f_locals.values():
                if isinstance(value, ShapeEnv):
                    places = (getattr(guard.sloc, "maybe_user_loc", None) for guard in value.guards)
                    yield from (str(place) for place in places if place)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


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
        _note_choices()
    # Inductor asks whether the compiler knows an extension by loading what it makes in a new Python that imports torch:
    # seconds for each, and the CPU was asked already.
    cpu_vec_isa.VecISA.check_build = lambda self, code: host.accepts(self.build_arch_flags().split(), code)  # type: ignore[method-assign]
    return Path(str(torch._inductor.aot_compile(module, inputs, options={**options})))


def expand(
    module: fx.GraphModule,
    inputs: tuple[torch.Tensor, ...],
    symbols: Symbols,
    kernels: Mapping[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """Put Triton's kernels into a graph in place of ops that launch them, so that they become part of the binary.

    Args:
        kernels: op -> what computes it, with `torch.library.wrap_triton` around each kernel.
    """
    graph = module.graph
    found = [node for node in graph.nodes if node.target in kernels]
    if not found:
        return module
    values: dict[fx.Node, Any] = {}

    class Values(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    with symbols.mode, enable_python_dispatcher():  # some ops are written in terms of others for symbols in Python only
        Values(module).run(*inputs)
        for node in found:
            _inline(module, node, kernels[node.target], values)
    graph.lint()
    module.recompile()
    return module


def _inline(module: fx.GraphModule, node: fx.Node, kernel: Callable[..., Any], values: dict[fx.Node, Any]) -> None:
    """Put what `kernel` does in place of a node. The rest of the graph stays as it is."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph, given = module.graph, node.all_input_nodes

    def call(*tensors: Any) -> Any:
        known = dict(zip(given, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        return kernel(*args, **kwargs)

    # Not functionalised: then a kernel's write into an input would be lost.
    inner = make_fx(call)(*(values[n] for n in given))
    places: dict[fx.Node, fx.Node] = dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for constant in inner.graph.find_nodes(op="get_attr"):
            name = f"{node.name}_{constant.target}"
            setattr(module, name, getattr(inner, constant.target))
            places[constant] = graph.get_attr(name)
        result = graph.graph_copy(inner.graph, places)
    if isinstance(result, (list, tuple)):
        for item in list(node.users):
            made = result[int(item.args[1])]  # type: ignore[arg-type]
            values[made] = values[item]  # the next op of ours may read it
            item.replace_all_uses_with(made)
            graph.erase_node(item)
    elif isinstance(result, fx.Node):
        values[result] = values[node]
        node.replace_all_uses_with(result)
    graph.erase_node(node)


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


_choices: dict[str, str] = {}
"""By name of a kernel, what decided on its configuration: `rules`, `record` or `clock`."""


def _note_choices() -> None:
    """Have Inductor tell how it came to each kernel's configuration."""
    from torch._inductor.runtime import triton_heuristics
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    begin, save = CachingAutotuner.__init__, CachingAutotuner.save_gpu_kernel
    said: dict[int, tuple[bool, int]] = {}

    def init(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        recorded = triton_heuristics.lookup_autotune_config(self.size_hints, self.fn) is not None
        said[id(self)] = (recorded, len(self.configs))

    def saved(self: Any, stream: Any, launcher: Any) -> None:
        save(self, stream, launcher)  # type: ignore[no-untyped-call]
        recorded, candidates = said[id(self)]
        timed = not self.deterministic_mode and (candidates > 1 or self.inductor_meta.get("coordinate_descent_tuning"))
        chosen = "record" if recorded else "clock" if timed and not self.custom_kernel else "rules"
        _choices[self.inductor_meta["kernel_name"]] = chosen

    CachingAutotuner.__init__ = init  # type: ignore[method-assign]
    CachingAutotuner.save_gpu_kernel = saved  # type: ignore[method-assign]


def compiled_kernels() -> Iterator[dict[str, Any]]:
    """Every kernel that this process has compiled: `name`, `cubin`, `warps`, `shared` (bytes that a launch asks for),
    `chosen` (what decided on its configuration)."""
    from torch._inductor.codecache import CudaKernelParamCache

    for key, params in CudaKernelParamCache.cache.items():
        yield {
            "name": str(params["mangled_name"]),
            "cubin": Path(str(params["cubin_path"])),
            "warps": int(params["num_warps"]),
            "shared": int(params["shared_mem"]),
            "chosen": _choices.get(key, "rules"),
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
