"""Who chooses the configuration of a kernel: Inductor's rules, a tuning record, or a clock, and what that has measured.
A build without a record can do without it.

A kernel is an object of Inductor's CachingAutotuner, made of the kernel's source, its size hints and candidates; it
times these when it is first called, which AOTInductor does while it compiles. Checked with 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fxc.errors import CompileError, IncompatibleError

HEURISTICS = ("pointwise", "reduction", "persistent_reduction")
"""What makes the candidates of kernels that Inductor writes itself."""
TIMED = {
    "autotune_local_cache": False,
    "autotune_pointwise": True,
    "coordinate_descent_tuning": True,
    "deterministic": False,
    "max_autotune_pointwise": True,
}
"""What these are told of the configuration to give all candidates, and to try the neighbours of the fastest."""
UNTIMED = {"coordinate_descent_tuning": False, "dynamic_scale_rblock": False}
"""Lets a configuration be as it is."""
LEAST = {"XBLOCK": "min_xblock", "R0_BLOCK": "min_rblock"}
"""Bounds that Inductor may ask of a kernel's blocks, from 2.14 on."""


_GIVEN = ("size_hints", "triton_meta", "inductor_meta", "return_configs")
NAMES: dict[str, tuple[str, ...]] = {
    "CachingAutotuner.__init__": ("configs",),
    "CachingAutotuner.save_gpu_kernel": ("stream", "launcher"),
    "CoordescTuner.lookup_in_cache": ("config",),
    "TRITON_MAX_BLOCK.get": (),
    "generate_lookup_hash_from_source_code": ("size_hints_str", "source_code"),
    "lookup_autotune_config": ("size_hints", "fn"),
    **dict.fromkeys(HEURISTICS, _GIVEN),
}
"""What is used of Inductor's module of heuristics, and what that must take."""
FIELDS = (
    "configs", "coordesc_tuner", "custom_kernel", "deterministic_mode", "fn", "inductor_meta", "launchers",
    "size_hints",
)  # fmt: skip
"""What a CachingAutotuner makes of itself."""
META = ("kernel_name", *sorted({*TIMED, *UNTIMED}))
"""What Inductor's generated code says of a kernel in `inductor_meta`."""


def missing(heuristics: Any, writer: str) -> list[str]:
    """What Inductor's module of heuristics, and the text of the one that writes kernels, lack of all this."""
    found = []
    for name, parameters in NAMES.items():
        try:
            value = attrgetter(name)(heuristics)
        except AttributeError:
            found.append(name)
            continue
        takes = inspect.signature(value).parameters if parameters else {}
        found += [f"{name}({parameter})" for parameter in parameters if parameter not in takes]
    if not found:
        fields = heuristics.CachingAutotuner.__init__.__code__.co_names
        found += [f"CachingAutotuner().{field}" for field in FIELDS if field not in fields]
    return found + [f'inductor_meta["{key}"]' for key in META if writer and f'"{key}"' not in writer]


def require(heuristics: Any, writer: str) -> None:
    """Refuse a torch that lacks something; arguments as of `missing`.

    Raises:
        IncompatibleError: names it.
    """
    if lacks := missing(heuristics, writer):
        raise IncompatibleError(
            f"kernels cannot be tuned with torch {torch.__version__}: its Inductor lacks {', '.join(lacks)}"
        )


class Choice(NamedTuple):
    """How a kernel came to its configuration."""

    chosen: str = "unknown"
    """`rules`, `tuned` or `clock`; `unknown` where Inductor cannot be watched."""
    hash: str = ""
    """What a tuning record calls it; empty for a kernel that Inductor does not look for there."""


class Choices:
    """How each kernel of a process came to its configuration."""

    def __init__(self) -> None:
        self._by_name: dict[str, Choice] = {}
        self._candidates: dict[int, int] = {}
        self._tuned: set[int] = set()

    def of(self, kernel: str) -> Choice:
        """By the name that Inductor gave it."""
        return self._by_name.get(kernel, Choice())

    def watch(self, heuristics: Any) -> None:
        """Note it from now on; and leave what a tuning record says as it is.

        Args:
            heuristics: Inductor's module.
        """
        tuner = heuristics.CachingAutotuner
        begin, save = tuner.__init__, tuner.save_gpu_kernel

        def init(kernel: Any, *args: Any, **options: Any) -> None:
            begin(kernel, *args, **options)
            self._candidates[id(kernel)] = len(kernel.configs)
            self._tuned.discard(id(kernel))  # of one that is gone
            if heuristics.lookup_autotune_config(kernel.size_hints, kernel.fn) is not None:
                self._tuned.add(id(kernel))
                _require_fit(kernel, options["configs"], heuristics.TRITON_MAX_BLOCK)
                kernel.inductor_meta.update(UNTIMED)

        def saved(kernel: Any, stream: Any, launcher: Any) -> None:
            save(kernel, stream, launcher)
            several = self._candidates[id(kernel)] > 1 or kernel.inductor_meta.get("coordinate_descent_tuning")
            timed = several and not kernel.deterministic_mode and not kernel.custom_kernel
            chosen = "clock" if timed else "rules"
            chosen = "tuned" if id(kernel) in self._tuned else chosen
            self._by_name[kernel.inductor_meta["kernel_name"]] = Choice(chosen, _hash(heuristics, kernel))

        tuner.__init__ = init
        tuner.save_gpu_kernel = saved


def _require_fit(kernel: Any, candidates: list[Any], largest: dict[str, int]) -> None:
    """Refuse a configuration from a record that the kernel's source was not written for: masks that Inductor left out
    rest on the largest block.

    Raises:
        CompileError: names the kernel, the block and both values.
    """
    (found,) = kernel.configs
    name = kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__
    if found.kwargs.keys() != candidates[0].kwargs.keys():
        raise CompileError(
            f"the tuning record has {', '.join(found.kwargs) or 'no block'} for kernel {name}, "
            f"expected {', '.join(candidates[0].kwargs) or 'none'}"
        )
    for block, size in found.kwargs.items():
        most = largest.get(block.partition("BLOCK")[0], math.inf)
        least = kernel.inductor_meta.get(LEAST.get(block, ""), 1)
        if not least <= size <= most:
            raise CompileError(f"the tuning record has {block} {size} for kernel {name}, expected {least} to {most}")


class Stopwatch:
    """Times all candidates of each kernel that a process compiles, in an otherwise unchanged compilation: kernels are
    those of a build by rules."""

    def __init__(self) -> None:
        self._kernels: list[tuple[Any, Any]] = []
        """Each with what rules choose for it."""

    def start(self, heuristics: Any) -> None:
        """Time them from now on."""
        for name in HEURISTICS:
            setattr(heuristics, name, self._timed(getattr(heuristics, name)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def heuristic(*args: Any, **options: Any) -> Any:
            if options.get("return_configs"):  # asked by another heuristic
                return original(*args, **options)

            def told(**changes: Any) -> Callable[[Any], Any]:
                copies = {name: dict(options[name]) for name in ("size_hints", "triton_meta", "inductor_meta")}
                copies["inductor_meta"] |= changes
                decorate: Callable[[Any], Any] = original(*args, **{**options, **copies})
                return decorate

            by_rules, by_clock = told(autotune_local_cache=False), told(**TIMED)

            def decorate(function: Any) -> Any:
                rules = by_rules(function).configs[0]
                kernel = by_clock(function)
                if not any(_same(rules, candidate) for candidate in kernel.configs):
                    kernel.configs = [*kernel.configs, rules]
                self._kernels.append((kernel, rules))
                return kernel

            return decorate

        return heuristic

    def results(self, heuristics: Any) -> Iterator[dict[str, Any]]:
        """Per kernel that ran and whose configuration Inductor's table can say: `hash`, `name`, `configuration`, `us`,
        `rules`, `rules_us`."""
        for kernel, rules in self._kernels:
            if not kernel.launchers:
                continue
            best = kernel.launchers[0].config
            us, rules_us = (_us(kernel.coordesc_tuner.lookup_in_cache(config)) for config in (best, rules))
            hash = _hash(heuristics, kernel)
            if us is None or not hash or not (_sayable(best) and _sayable(rules)):
                continue
            yield {
                "hash": hash,
                "name": kernel.inductor_meta["kernel_name"],
                "configuration": _plain(best),
                "us": us,
                "rules": _plain(rules),
                "rules_us": rules_us,
            }


def _hash(heuristics: Any, kernel: Any) -> str:
    """As `lookup_autotune_config` has it."""
    if "_fused_" not in kernel.fn.src:
        return ""
    return str(heuristics.generate_lookup_hash_from_source_code(str(kernel.size_hints), kernel.fn.src))


def _same(one: Any, other: Any) -> bool:
    return _plain(one) == _plain(other)


def _plain(config: Any) -> dict[str, int]:
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _sayable(config: Any) -> bool:
    """Whether `lookup_autotune_config` would make the same of it."""
    return all("BLOCK" in name for name in config.kwargs) and getattr(config, "maxnreg", None) is None


def _us(milliseconds: float | None) -> float | None:
    """None for what was not timed, and for what Inductor calls infinite."""
    return round(milliseconds * 1e3, 3) if milliseconds is not None and math.isfinite(milliseconds) else None


_choices = Choices()
_stopwatch = Stopwatch()


def watch(heuristics: Callable[[], Any], required: bool) -> None:
    """Have how each kernel of this process comes to its configuration noted.

    Args:
        heuristics: gives Inductor's module.
        required: whether there is a tuning record. Without one what torch lacks leaves choices unknown.

    Raises:
        IncompatibleError: names what it lacks.
    """
    try:
        found = heuristics()
    except IncompatibleError:
        if required:
            raise
        return
    _choices.watch(found)


def choice(kernel: str) -> Choice:
    """What that has noted of a kernel, by the name that Inductor gave it."""
    return _choices.of(kernel)


def time_kernels(heuristics: Any) -> None:
    """Have Inductor, of whose module this changes functions, time all candidates of each kernel that this process
    compiles."""
    _stopwatch.start(heuristics)


def timed_kernels(heuristics: Any) -> list[dict[str, Any]]:
    """What that has given, as `Stopwatch.results`."""
    return list(_stopwatch.results(heuristics))
