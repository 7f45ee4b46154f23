"""What computes attention in a program: chosen once, when it is built, and named in its manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from fxc.ops.attention import attention
from fxc.ops.paged import paged_attention, paged_attention_out
from fxc.target import Target

NONE: Mapping[Any, Any] = MappingProxyType({})


class Backend:
    """Computes an op for the devices that it supports."""

    name: ClassVar[str]
    op: ClassVar[Any]
    """The overload of a custom op."""
    compiled: ClassVar[Mapping[str, Any]] = NONE
    """Calls that a build makes binaries of, so that a server compiles nothing: the op's qualified name, and the
    overload that writes the result into a tensor which the step hands over."""

    def refuses(self, target: Target) -> str:
        """Why it cannot be used for a device; empty where it can."""
        return ""

    def kernels(self, target: Target) -> Mapping[Any, Callable[..., Any]]:
        """Per overload, what puts the launches of its kernels into a graph that is being traced."""
        return NONE


class Triton(Backend):
    """Our kernels (`paged_kernels.py`), for tensor cores of compute capability 8.0 and later."""

    name = "triton"
    op = paged_attention
    compiled = MappingProxyType({"fxc::attention.paged": paged_attention_out})

    def refuses(self, target: Target) -> str:
        if target.device != "cuda":
            return f"has no kernels for {target.device}"
        if (capability := target.compute_capability or (0, 0)) < (8, 0):
            return f"wants compute capability 8.0 or later, this is {'.'.join(map(str, capability))}"
        return ""

    def kernels(self, target: Target) -> Mapping[Any, Callable[..., Any]]:
        from fxc.ops import paged_triton

        sms = int(target.properties["multi_processor_count"])
        attend = partial(paged_triton.attend, call=paged_triton.trace, sms=sms)

        def attend_into(*args: Any, **options: Any) -> None:
            attend(*args, **options)

        return {paged_attention: attend, paged_attention_out: attend_into}


class Reference(Backend):
    """Plain torch ops, request by request: right on any device, and slow."""

    name = "reference"
    op = paged_attention


class Sdpa(Backend):
    """`torch.nn.functional.scaled_dot_product_attention`, which chooses among its own kernels at each call."""

    name = "sdpa"
    op = attention


BACKENDS: tuple[Backend, ...] = (Triton(), Reference(), Sdpa())
"""Of those for one op, the preferred one first."""


def choose(target: Target, backends: Sequence[Backend] = BACKENDS) -> dict[Any, Backend]:
    """For each op the first backend that supports the device."""
    found: dict[Any, Backend] = {}
    for backend in backends:
        if not backend.refuses(target):
            found.setdefault(backend.op, backend)
    return found
