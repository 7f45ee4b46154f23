"""Headers and link stubs that host code for a GPU is compiled with, put together without a CUDA toolkit.

torch's wheels bring the runtime's headers and libraries, but neither `crt/host_defines.h`, without which those headers
do not compile, nor a libcuda to link with: that is the driver's. Triton's wheel has the header, and what a linker wants
of the driver is names alone, which `cuda.h` lists.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fxc.errors import CompileError

HEADERS = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
"""What the C++ that Inductor writes includes of CUDA, and what those include."""
TARGET = "nv/target"
"""Of libcu++, which may be missing: the headers of 16-bit floats ask it which of two texts is meant for the device."""
HOST_TARGET = """\
// Made by fxc for host compilers, to which the second text of two is addressed.
#pragma once
#define NV_IS_DEVICE 0
#define NV_IS_HOST 1
#define NV_ANY_TARGET 1
#define NV_NO_TARGET 0
#define NV_PROVIDES_SM_53 0
#define NV_PROVIDES_SM_60 0
#define NV_PROVIDES_SM_70 0
#define NV_PROVIDES_SM_75 0
#define NV_PROVIDES_SM_80 0
#define NV_PROVIDES_SM_86 0
#define NV_PROVIDES_SM_89 0
#define NV_PROVIDES_SM_90 0
#define NV_PROVIDES_SM_100 0
#define FXC_NV_BARE(text) FXC_NV_OUTER(FXC_NV_INNER text)
#define FXC_NV_INNER(...) FXC_NV_INNER __VA_ARGS__
#define FXC_NV_OUTER(...) FXC_NV_PASTE(__VA_ARGS__)
#define FXC_NV_PASTE(...) FXC_NV_##__VA_ARGS__
#define FXC_NV_FXC_NV_INNER
#define FXC_NV_0(first, second) FXC_NV_BARE(second)
#define FXC_NV_1(first, second) FXC_NV_BARE(first)
#define FXC_NV_JOIN(number) FXC_NV_##number
#define FXC_NV_CHOOSE(number) FXC_NV_JOIN(number)
#define NV_IF_ELSE_TARGET(condition, first, second) FXC_NV_CHOOSE(condition)(first, second)
#define NV_IF_TARGET(condition, ...) FXC_NV_IF(condition, __VA_ARGS__, ())
#define FXC_NV_IF(condition, first, second, ...) FXC_NV_CHOOSE(condition)(first, second)
"""
WHERE = {
    "cuda.h": "pip install nvidia-cuda-runtime",
    "cuda_runtime_api.h": "pip install nvidia-cuda-runtime",
    "crt/host_defines.h": "pip install triton, or nvidia-cuda-crt",
}


def include_dirs() -> list[Path]:
    """Folders with CUDA headers, those that came with torch first; a toolkit comes last."""
    return [path for path in _candidates() if path.is_dir()]


def _candidates() -> Iterator[Path]:
    for root in _package("nvidia"):
        yield from sorted(root.glob("cu[0-9]*/include"), reverse=True)
        yield from (root / "cuda_runtime" / "include", root / "cuda_crt" / "include")  # for CUDA 12
    for root in _package("triton"):
        yield root / "backends" / "nvidia" / "include"
    yield Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"


def _package(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []


def missing(folders: list[Path]) -> list[str]:
    """Headers that none of the folders has."""
    return [name for name in HEADERS if not any((folder / name).is_file() for folder in folders)]


def make(scratch: Path) -> Path:
    """A folder laid out like a CUDA toolkit: `include`, `lib64/stubs`. Made once for the headers that are found.

    Raises:
        CompileError: a header is nowhere, or the compiler fails.
    """
    folders = include_dirs()
    if absent := missing(folders):
        raise CompileError(
            f"there is no {absent[0]} in {', '.join(map(str, folders)) or 'any package'}", WHERE[absent[0]]
        )
    chosen = [next(folder for folder in folders if (folder / name).is_file()) for name in HEADERS]
    target = next((folder / TARGET for folder in _target_dirs(folders) if (folder / TARGET).is_file()), None)
    seal = [
        f"{folder / name} {(folder / name).stat().st_mtime_ns}" for folder, name in zip(chosen, HEADERS, strict=True)
    ]
    parts = [*seal, str(target or HOST_TARGET), *_compiler()]
    place = scratch / f"cuda-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
    if place.exists():
        return place
    scratch.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{place.name}", dir=scratch))
    try:
        _links(chosen, part / "include")
        if not (part / "include" / TARGET).is_file():
            _provide(target, part / "include" / TARGET)
        _stub(part)
        os.rename(part, place)
    except OSError:
        if not place.exists():  # another build has made it meanwhile
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def _target_dirs(folders: list[Path]) -> list[Path]:
    return [place for folder in folders for place in (folder, folder / "cccl")]


def _provide(target: Path | None, place: Path) -> None:
    if target is not None:
        place.parent.symlink_to(target.parent)
    else:
        place.parent.mkdir()
        place.write_text(HOST_TARGET)


def _links(folders: list[Path], into: Path) -> None:
    """Links to every header; where several folders have one, to that of the first."""
    for folder in dict.fromkeys(folders):
        for path in folder.iterdir():
            link = into / path.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(path)


def _stub(place: Path) -> None:
    """A libcuda that defines what cuda.h declares, and does nothing. An empty one would not do: `--as-needed` drops a
    library of which no symbol is used, and the binary would not ask for the driver."""
    stubs = place / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    declared = _run([*_compiler(), "-E", "-x", "c++", f"-I{place / 'include'}", "-"], "#include <cuda.h>\n")
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", declared)))
    source = "".join(f'extern "C" void {name}() {{}}\n' for name in names)
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c++", "-o", str(stubs / "libcuda.so"), "-"]
    _run([*_compiler(), *flags], source)
    (place / "lib64" / "libcuda.so").symlink_to("stubs/libcuda.so")
    (place / "lib64" / "libcudart_static.a").touch()  # by which torch knows the folder; nothing is linked with it


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "g++")


def _run(command: list[str], text: str) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} does not run: {error.strerror}", "apt install g++, or set CXX") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise CompileError(f"a stub of libcuda cannot be made: {(lines or ['no message'])[0]}")
    return done.stdout
