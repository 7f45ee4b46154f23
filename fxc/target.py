"""What a binary is compiled for, as a record: never asked of the machine while compiling."""

from __future__ import annotations

import msgspec

X86_64_V2 = ("popcnt", "sse4_1", "sse4_2", "ssse3")
X86_64_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt", "sse4_1", "sse4_2", "ssse3")
_AVX512 = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
LEVELS = {"x86-64-v2": X86_64_V2, "x86-64-v3": X86_64_V3, "x86-64-v4": tuple(sorted((*X86_64_V3, *_AVX512)))}
"""What the levels of the x86-64 psABI have, as /proc/cpuinfo spells it."""
DEFAULT_LEVEL = "x86-64-v3"
"""Of host code that is glue around a GPU: any server of the last ten years has it."""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device and the toolchain whose binaries it can run. Part of every key."""

    device: str
    """`cpu` or `cuda`."""
    arch: str
    """`x86_64`, `aarch64`: of the host."""
    cpu_features: tuple[str, ...]
    """Vector extensions the compiler may use for host code, sorted: `avx2`, `fma`, `avx512f`, ... For cuda on
    x86_64, where host code is glue, those of a level of `LEVELS`."""
    torch: str
    """Version of torch with its build, `2.13.0+cpu`."""
    triton: str = ""
    """Version of triton; empty for cpu."""
    cuda: str = ""
    """CUDA version of the torch build, `13.0`; empty for cpu."""
    compute_capability: tuple[int, int] | None = None
    """(major, minor) of the GPU; None for cpu."""
    properties: dict[str, int | str] = {}
    """Device properties that Inductor and Triton read when they choose: multiprocessor count, shared memory, ..."""
    compiler: str = ""
    """`g++ 12.2.0`: the host compiler."""

    @property
    def march(self) -> str:
        """`-march` for host code instead of the builder's own CPU; empty where that is the one that is meant."""
        if self.device != "cuda" or self.arch != "x86_64":
            return ""
        return next((name for name, level in LEVELS.items() if level == self.cpu_features), DEFAULT_LEVEL)
