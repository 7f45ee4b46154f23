"""A GPU that is not there: a process in which torch, Inductor and Triton compile for one as if it were.

A build for a record runs in a child process of its own, and so do the jobs that it forks: most of what is told of the
device here is remembered somewhere in torch for as long as the process lives.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from fxc import _torch_build, cubin
from fxc.errors import CompileError, UsageError
from fxc.records import Record

REGISTERS_AT_ONCE = 256
"""Registers are given to a warp so many at a time, from compute capability 7.0 on (CUDA's occupancy calculator)."""


class Properties:
    """What torch tells of a GPU, out of a record. A property that the record lacks is an error, whoever asks: taking
    it for an absent attribute, torch would go on with a guess."""

    def __init__(self, record: Record, known: frozenset[str]) -> None:
        """`known`: what this torch tells of a real one."""
        self.__dict__.update(record.properties)
        self.major, self.minor = record.compute_capability
        self.gcnArchName = record.name
        self._known = known

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._known:
            raise UsageError(
                f"the target record of {self.name} has no {name}, which torch asks for",
                "`fxc target dump FILE` on such a device writes all that its torch knows",
            )
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        raise TypeError("properties of a GPU that is not there do not travel between processes")


def activate(record: Record, sdk: Path | None = None) -> None:
    """Make this process one whose only GPU is that of the record. There is no way back.

    Args:
        sdk: what `cuda_sdk.make` has made, for a process that compiles.
    """
    if sdk is not None:
        from torch.utils import cpp_extension

        os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = str(sdk)
        _drive(record)
    _torch_build.become_cuda(Properties(record, _torch_build.device_attributes()))


def _drive(record: Record) -> None:
    """Have Triton compile for the record's device."""
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.backends.nvidia.driver import ty_to_cpp
    from triton.runtime.driver import driver

    utils = _Utils(record)

    class Driver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = utils
            self.launcher_cls = _Launcher

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return str(ty_to_cpp(ty))

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", int("{}{}".format(*record.compute_capability)), record.properties["warp_size"])

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cuda", 0)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_device_interface(self) -> Any:
            import torch

            return torch.cuda

        def get_benchmarker(self) -> Any:
            raise CompileError("a kernel was to be timed, and there is no GPU")

        def get_empty_cache_for_benchmark(self) -> Any:
            raise CompileError("a kernel was to be timed, and there is no GPU")

        def clear_cache(self, cache: Any) -> None:
            pass

    own = triton.backends.backends["nvidia"]
    triton.backends.backends["nvidia"] = triton.backends.Backend(compiler=own.compiler, driver=Driver)
    driver.set_active(Driver())


class _Utils:
    """What Triton asks of the driver's library."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def get_device_properties(self, device: int) -> dict[str, Any]:
        told = self.record.properties
        return {
            "max_shared_mem": told["shared_memory_per_block_optin"],
            "max_num_regs": told["regs_per_multiprocessor"],
            "multiprocessor_count": told["multi_processor_count"],
            "warpSize": told["warp_size"],
            "sm_clock_rate": told["clock_rate"],
            "mem_clock_rate": told["memory_clock_rate"],
            "mem_bus_width": told["memory_bus_width"],
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """A module, a function, registers, spills (in words) and the most threads of a block: nothing is loaded."""
        usage = {entry.name: entry for entry in _usage(kernel)}
        if name not in usage:
            raise CompileError(f"the machine code of kernel {name} has {', '.join(usage) or 'no kernel'} instead")
        found = usage[name]
        told = {key: int(value) for key, value in self.record.properties.items() if isinstance(value, int)}
        warp = -(-max(found.registers, 1) * told["warp_size"] // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        most = min(told["max_threads_per_block"], told["regs_per_multiprocessor"] // warp * told["warp_size"])
        return 1, 1, found.registers, found.stack // 4, most

    def unload_module(self, module: int) -> None:
        pass


@functools.cache
def _usage(kernel: bytes) -> list[cubin.Usage]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel)
        file.flush()
        return cubin.usage(Path(file.name))


class _Launcher:
    """Launches nothing."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> None:
        pass
