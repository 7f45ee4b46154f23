"""What `fxc doctor` looks at. Each check says what it found and, where that is not enough, how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fxc.cache import Cache
from fxc.cli import render
from fxc.errors import FxcError

TORCH = ((2, 11), (2, 15))
"""Oldest and newest torch that fxc is tested with: 2.11, 2.13, 2.14 and 2.15."""
PYTHON = (3, 11)
FREE = 1 << 30
"""Bytes that should be free in the cache: a large model's binaries and what the compiler leaves meanwhile."""

APT = "apt install g++"


class Check(msgspec.Struct, frozen=True):
    name: str
    ok: bool
    needed: bool
    """Whether every build needs it; the rest is for `device: cuda` or `huggingface:` only."""
    found: str
    mend: str = ""


def every(cache_dir: Path | None) -> Iterator[Check]:
    """All checks, one at a time, so that each can be shown when it is done."""
    yield python()
    yield torch()
    yield compiler()
    yield strip()
    yield cache(cache_dir)
    yield cuda()
    yield triton()
    yield python_headers()
    yield transformers()


def python() -> Check:
    ok = sys.version_info[:2] >= PYTHON and sys.platform == "linux"
    mend = "" if ok else "use Python {}.{} or later on Linux".format(*PYTHON)
    return Check("python", ok, True, f"{platform.python_version()} on {sys.platform} {platform.machine()}", mend)


def torch() -> Check:
    oldest, newest = TORCH
    wanted = f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    mend = f"pip install '{wanted}'"
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        return Check("torch", False, True, f"cannot be imported: {_one_line(error)}", mend)
    version = str(torch.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    ok = found is not None and oldest <= (int(found[1]), int(found[2])) <= newest
    return Check("torch", ok, True, version if ok else f"{version}, fxc is tested with {wanted}", "" if ok else mend)


PROBE = """
#include <omp.h>
#include <sstream>
#include <stdexcept>
#include <string>
extern "C" int fxc_probe() {
  std::ostringstream text;
  text << 1.5 << omp_get_max_threads() * 0;
  try {
    throw std::runtime_error(text.str());
  } catch (const std::exception& error) {
    return std::string(error.what()) == "1.50" ? 7 : 1;
  }
}
"""
LOAD = "import ctypes, sys, torch; sys.exit(0 if ctypes.CDLL(sys.argv[1]).fxc_probe() == 7 else 1)"


def compiler() -> Check:
    """The host compiler, and whether a library that it makes works beside torch.

    One that links libstdc++ statically compiles without complaint, and the process crashes when the library is loaded.
    """
    name = os.environ.get("CXX") or "g++"
    words = name.split()
    if not words or shutil.which(words[0]) is None:
        where = "CXX names it" if os.environ.get("CXX") else "not on PATH"
        return Check("compiler", False, True, f"{name}: {where}, not found", f"{APT}, or set CXX to a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        Path(folder, "probe.cpp").write_text(PROBE)
        command = [
            *words,
            "-shared",
            "-fPIC",
            "-fopenmp",
            "-std=c++20",
            "-O1",
            f"{folder}/probe.cpp",
            "-o",
            str(library),
        ]
        made = _run(command)
        if made.returncode != 0 or not library.is_file():
            reason = next((text for text in made.stderr.splitlines() if "error" in text), made.stderr.strip())
            return Check("compiler", False, True, f"{name} cannot make a library: {reason}", f"{APT}, or unset CXX")
        loaded = _run([sys.executable, "-c", LOAD, str(library)])
        static = not re.search(rb"libstdc\+\+\.so|libc\+\+\.so", library.read_bytes())
    version = (_run([*words, "--version"]).stdout.splitlines() or ["unknown version"])[0]
    if loaded.returncode != 0 or static:
        ended = f"ends with {loaded.returncode} when" if loaded.returncode else "may crash when"
        why = ", it links the C++ library statically" if static else ""
        found = f"{version}: a process {ended} it loads a library that this compiler made{why}"
        return Check("compiler", False, True, found, "export CXX=/usr/bin/g++")
    return Check("compiler", True, True, f"{version} ({shutil.which(words[0])})")


def strip() -> Check:
    path = shutil.which("strip")
    return Check("strip", path is not None, True, path or "not on PATH", "" if path else "apt install binutils")


def cache(cache_dir: Path | None) -> Check:
    mend = "name another place with --cache-dir or FXC_CACHE_DIR"
    try:
        root = Cache.open(cache_dir).root
        there = next(path for path in (root, *root.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except (OSError, FxcError) as error:
        return Check("cache", False, True, f"cannot be written: {_one_line(error)}", mend)
    found = f"{root}, {render.size_bytes(free)} free"
    return Check(
        "cache", free >= FREE, True, found, "" if free >= FREE else f"free {render.size_bytes(FREE)}, or {mend}"
    )


def cuda() -> Check:
    try:
        import torch
    except Exception:
        return Check("cuda", False, False, "torch cannot be imported")
    if torch.version.cuda is None:
        return Check("cuda", False, False, "this torch is built without CUDA", "for device: cuda, a torch with CUDA")
    if not torch.cuda.is_available():
        found = f"torch has CUDA {torch.version.cuda}, but there is no device or no driver that is new enough"
        return Check("cuda", False, False, found, "for device: cuda, a GPU and its driver: `nvidia-smi` should list it")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("cuda", True, False, f"CUDA {torch.version.cuda}: {', '.join(names)}")


def triton() -> Check:
    return _package("triton", "for device: cuda, pip install 'fxc[cuda]'")


def transformers() -> Check:
    return _package("transformers", "for huggingface: models, pip install 'fxc[huggingface]'")


def python_headers() -> Check:
    """Triton compiles a small extension module for the driver."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    ok = header.is_file()
    package = "apt install python{}.{}-dev".format(*sys.version_info)
    return Check(
        "python headers", ok, False, str(header) if ok else f"no {header}", "" if ok else f"for device: cuda, {package}"
    )


def _package(name: str, mend: str) -> Check:
    try:
        return Check(name, True, False, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, False, "not installed", mend)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", _one_line(error))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
