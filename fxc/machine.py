"""Facts of this machine, and whether what was built for another one runs here.

Probing for a CPU imports no torch; `fits` is a pure function of two records.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fxc.errors import IncompatibleError, UsageError
from fxc.target import DEFAULT_LEVEL, LEVELS, Target

if TYPE_CHECKING:
    from fxc.manifest import Manifest

_ARCHS = {"amd64": "x86_64", "arm64": "aarch64"}
_X86 = re.compile(r"ssse3|sse4_[12]|avx\w*|fma|f16c|bmi[12]|abm|popcnt|movbe|adx|gfni|amx_\w+")
_ARM = re.compile(r"asimd\w*|fphp|sve\w*|bf16|i8mm|fcma|atomics|sme\w*")
PROPERTIES = (
    "name",
    "multi_processor_count",
    "warp_size",
    "regs_per_multiprocessor",
    "max_threads_per_multi_processor",
    "max_threads_per_block",
    "shared_memory_per_block",
    "shared_memory_per_block_optin",
    "shared_memory_per_multiprocessor",
    "L2_cache_size",
    "clock_rate",
    "memory_clock_rate",
    "memory_bus_width",
)
"""What Inductor and Triton read. Not the total memory: it differs between equal GPUs."""

LIMITS = (
    "warp_size",
    "max_threads_per_block",
    "regs_per_multiprocessor",
    "shared_memory_per_block_optin",
)
"""Properties that a device must have as much of as a binary was made for."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether one fact of this machine allows what was built."""

    name: str
    accepted: bool
    built: str
    here: str
    reason: str = ""
    """Why it is rejected."""


def probe(device: str, *, compiler: bool = True) -> Target:
    """The target that is this machine with `device`: `cpu`, `cuda`, `cuda:1`.

    Args:
        device: what programs run on.
        compiler: whether to ask the host compiler for its version; a loader has no use for it, and may have none.

    Raises:
        IncompatibleError: there is no such device.
    """
    kind, _, index = device.partition(":")
    host = compiler_version() if compiler else ""
    if kind == "cpu":
        return Target(device=kind, arch=_arch(), cpu_features=_features(), torch=torch_version()[0], compiler=host)
    if kind != "cuda":
        raise IncompatibleError(f"device {device!r}: expected cpu or cuda")
    capability, properties = _gpu(int(index) if index.isdigit() else None)
    return cuda_target(capability, properties, host)


def cuda_target(capability: tuple[int, int], properties: dict[str, int | str], compiler: str) -> Target:
    """The target that is a GPU, of this machine or not, with this machine's torch."""
    version, cuda = torch_version()
    return Target(
        device="cuda",
        arch=_arch(),
        cpu_features=LEVELS[DEFAULT_LEVEL] if _arch() == "x86_64" else _features(),  # as `Target.march` says
        torch=version,
        triton=_version("triton"),
        cuda=cuda,
        compute_capability=capability,
        properties=properties,
        compiler=compiler,
    )


def with_march(target: Target, march: str | None) -> Target:
    """The same with host code for another level of x86-64, such as `x86-64-v2`.

    Raises:
        UsageError: there is no such level, or the target's host code is not for one.
    """
    if march is None:
        return target
    if not target.march:
        raise UsageError(
            f"--march {march}: host code for {target.device} on {target.arch} is for the builder's own CPU"
        )
    if march not in LEVELS:
        raise UsageError(f"--march {march}: expected {', '.join(LEVELS)}")
    return msgspec.structs.replace(target, cpu_features=LEVELS[march])


def served(device: str) -> Iterator[Target]:
    """What a loader on this machine may look for: what a build here is for, then, highest first, the same with host
    code for another level that this CPU has."""
    usual = probe(device, compiler=False)
    yield usual
    if usual.march:
        features = {*_features()}
        others = (
            level for name, level in reversed(LEVELS.items()) if name != usual.march and features.issuperset(level)
        )
        yield from (msgspec.structs.replace(usual, cpu_features=level) for level in others)


def here(device: str) -> Target:
    """Facts of this machine to hold a target against: unlike in `probe`, all that its CPU can do."""
    return msgspec.structs.replace(probe(device, compiler=False), cpu_features=_features())


def fits(
    target: Target, here: Target, needs: Mapping[str, str] = {}, offers: Mapping[str, str] = {}
) -> list[Verdict]:  # fmt: skip
    """Whether a binary for `target` runs on the machine with the facts `here`, one by one.

    What a driver can run needs no fact: torch finds no device where the driver is too old for its own CUDA version, and
    kernels are machine code, which every driver of that major version loads.

    Args:
        needs: versions of the C and C++ libraries that it asks for, as `needs_of`.
        offers: those of this machine, as `libraries`; what is not known here is not held against it.
    """
    verdicts = [
        _equal("device", target.device, here.device),
        _equal("arch", target.arch, here.arch),
        _torch(target.torch, here.torch),
    ]
    verdicts += [_library(name, version, offers[name]) for name, version in needs.items() if name in offers]
    if target.device != here.device:
        return verdicts
    verdicts.append(_cpu(target.cpu_features, here.cpu_features))
    if target.device == "cuda":
        built, found = _dotted(target.compute_capability), _dotted(here.compute_capability)
        verdicts.append(_equal("compute_capability", built, found))
        same = target.cuda.split(".")[0] == here.cuda.split(".")[0]
        verdicts.append(Verdict("cuda", same, target.cuda, here.cuda, "" if same else "another major version"))
        verdicts += _limits(target.properties, here.properties)
    return verdicts


def require_fit(
    target: Target, here: Target, needs: Mapping[str, str] = {}, offers: Mapping[str, str] = {}
) -> None:  # fmt: skip
    """Refuse what does not fit; arguments as of `fits`.

    Raises:
        IncompatibleError: names every rejected fact with both values.
    """
    rejected = [verdict for verdict in fits(target, here, needs, offers) if not verdict.accepted]
    if rejected:
        facts = "; ".join(f"{v.name}: built for {v.built}, here {v.here} ({v.reason})" for v in rejected)
        raise IncompatibleError(f"the artifact does not fit this machine: {facts}", "build it for this machine")


def libraries() -> dict[str, str]:
    """Versions of the C library and, where one is loaded, of the C++ library; `GLIBC` and `GLIBCXX`."""
    found: dict[str, str] = {}
    with suppress(OSError, ValueError):
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        found |= {"GLIBC": version} if name == "glibc" else {}
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        if loaded := re.search(r"(/\S*/libstdc\+\+\.so\S*)$", maps, re.MULTILINE):
            found |= {name: version for name, version in _newest(loaded[1]).items() if name == "GLIBCXX"}
    return found


def needed(library: bytes) -> dict[str, str]:
    """Versions of the C and C++ libraries that a shared library asks for, or has: the highest that its symbols name."""
    found: dict[str, str] = {}
    for name, version in re.findall(rb"\0(GLIBC|GLIBCXX)_(\d+(?:\.\d+)+)(?=\0)", library):
        found[name.decode()] = newest(found.get(name.decode(), ""), version.decode())
    return dict(sorted(found.items()))


def needs_of(manifest: Manifest) -> dict[str, str]:
    """The same of all binaries of an artifact."""
    found: dict[str, str] = {}
    for binary in manifest.binaries.values():
        for name, version in binary.needs.items():
            found[name] = newest(found.get(name, ""), version)
    return found


@functools.cache
def _newest(path: str) -> dict[str, str]:
    return needed(Path(path).read_bytes())


def newest(one: str, other: str) -> str:
    """The higher of two dotted versions; an empty one is the lowest."""
    return max(one, other, key=_numbers)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def torch_version() -> tuple[str, str]:
    """torch's version with its build, and the CUDA version it was built for; torch is not imported.

    Read from torch/version.py: the metadata of a package from PyPI leaves the build out.

    Raises:
        IncompatibleError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise IncompatibleError("torch is not installed", "pip install torch")
    return parse_torch_version((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))


def parse_torch_version(text: str) -> tuple[str, str]:
    """torch's version and CUDA's from the text of torch/version.py."""
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return version[1] if version else _version("torch"), cuda[1] if cuda else ""


@functools.cache
def compiler_version() -> str:
    """`g++ 12.2.0`: name and version of $CXX or g++; empty where there is none."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return parse_compiler(done.stdout)


def parse_compiler(text: str) -> str:
    """`g++ 12.2.0` from what `g++ --version` prints."""
    line = text.partition("\n")[0]
    name = "clang" if "clang" in line else line.partition(" ")[0].rsplit("/")[-1]
    versions = re.findall(r"\d+\.\d+(?:\.\d+)?", re.sub(r"\([^)]*\)", "", line))
    return f"{name} {versions[0]}" if versions else name


def parse_features(cpuinfo: str, arch: str) -> tuple[str, ...]:
    """Extensions in /proc/cpuinfo for which a compiler writes other code, sorted."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    pattern = _X86 if arch == "x86_64" else _ARM
    return tuple(sorted({flag for flag in (match[1].split() if match else ()) if pattern.fullmatch(flag)}))


def _arch() -> str:
    name = platform.machine().lower()
    return _ARCHS.get(name, name)


@functools.cache
def _features() -> tuple[str, ...]:
    try:
        return parse_features(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"), _arch())
    except OSError:
        return ()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpu(index: int | None) -> tuple[tuple[int, int], dict[str, int | str]]:
    import torch

    if not torch.cuda.is_available():
        why = "no usable driver or GPU was found" if torch.version.cuda else f"torch {torch.__version__} has no CUDA"
        raise IncompatibleError(f"there is no CUDA device: {why}", "`fxc doctor` tells more")
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise IncompatibleError(f"there is no device cuda:{index}: this machine has {count}")
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    properties = {name: getattr(found, name) for name in PROPERTIES if hasattr(found, name)}
    return (found.major, found.minor), properties


def _equal(name: str, built: str, here: str) -> Verdict:
    return Verdict(name, built == here, built, here, "" if built == here else "must be equal")


def _torch(built: str, here: str) -> Verdict:
    """Binaries call a C interface that torch extends from one minor version to the next."""
    same = built.split(".")[:2] == here.split(".")[:2]
    return Verdict("torch", same, built, here, "" if same else "another minor version")


def _limits(built: dict[str, int | str], here: dict[str, int | str]) -> list[Verdict]:
    """Kernels were made to use as much of a multiprocessor as the build was told that there is."""
    both = [name for name in LIMITS if name in built and name in here]
    return [_limit(name, int(built[name]), int(here[name])) for name in both]


def _limit(name: str, built: int, here: int) -> Verdict:
    return Verdict(name, built <= here, str(built), str(here), "" if built <= here else "this device has less")


def _library(name: str, built: str, here: str) -> Verdict:
    enough = _numbers(built) <= _numbers(here)
    return Verdict(name, enough, built, here, "" if enough else "older than what the compiler linked with")


def _cpu(built: tuple[str, ...], here: tuple[str, ...]) -> Verdict:
    missing = [feature for feature in built if feature not in here]
    reason = f"this CPU lacks {', '.join(missing)}" if missing else ""
    return Verdict("cpu_features", not missing, " ".join(built) or "any", " ".join(here) or "none", reason)


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability)) if capability else "none"
