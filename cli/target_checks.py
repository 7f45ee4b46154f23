"""What `fxc doctor --target` looks at: what a build for a GPU needs on a machine that has none."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fxc import cubin, cuda_sdk, machine, records
from fxc.cli.checks import Check
from fxc.errors import FxcError
from fxc.records import Record


def every(record: Record) -> Iterator[Check]:
    """All checks, one at a time."""
    tested = record.tested or "no binary for it has run yet"
    yield Check("target", True, True, f"{record.name}, {record.arch}: {tested}")
    yield torch_cuda()
    yield triton_nvidia()
    yield cuobjdump()
    yield headers()
    yield stub()


def torch_cuda() -> Check:
    try:
        version, cuda = machine.torch_version()
    except FxcError as error:
        return Check("torch for CUDA", False, True, error.message, error.hint)
    found = f"{version}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"
    return Check("torch for CUDA", bool(cuda), True, found, "" if cuda else records.mend(version))


def triton_nvidia() -> Check:
    spec = importlib.util.find_spec("triton")
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    tool = next((p for place in places if (p := place / "backends" / "nvidia" / "bin" / "ptxas").is_file()), None)
    return Check("ptxas", tool is not None, True, str(tool or "Triton has none"), "" if tool else "pip install triton")


def cuobjdump() -> Check:
    try:
        return Check("cuobjdump", True, True, cubin.tool_path())
    except FxcError as error:
        return Check("cuobjdump", False, True, error.message, error.hint)


def headers() -> Check:
    folders = cuda_sdk.include_dirs()
    absent = cuda_sdk.missing(folders)
    found = f"no {', '.join(absent)}" if absent else ", ".join(map(str, folders))
    return Check("CUDA headers", not absent, True, found, "; ".join(cuda_sdk.WHERE[name] for name in absent))


def stub() -> Check:
    """Whether a libcuda to link with can be made."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            cuda_sdk.make(Path(scratch))
    except FxcError as error:
        return Check("libcuda stub", False, True, error.message, error.hint)
    return Check("libcuda stub", True, True, "can be made; no driver is needed")
