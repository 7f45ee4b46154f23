"""Every private name of torch that stands in for a GPU which is not there. Checked with 2.11."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
            with _memory():
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
    _pretended.append(_memory())


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


def _memory() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)
