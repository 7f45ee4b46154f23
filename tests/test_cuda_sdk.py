"""A folder like a CUDA toolkit, out of what packages bring; and what a library needs of the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fxc import cuda_sdk
from fxc.errors import CompileError

CUDA_H = '#include "cuda_types.h"\nextern "C" { CUresult cuInit(unsigned); CUresult cuLaunchKernel(void*); }\n'


def headers(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CUDA_H if name == "cuda.h" else f"// {folder.name}\n")
    (folder / "cuda_types.h").write_text("typedef int CUresult;\n")
    return folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found = [
        headers(tmp_path / "runtime", "cuda.h", "cuda_runtime_api.h"),
        headers(tmp_path / "triton", "cuda.h", "crt/host_defines.h"),
    ]
    monkeypatch.setattr(cuda_sdk, "include_dirs", lambda: found)
    return found


@pytest.mark.usefixtures("folders")
def test_headers_and_a_stub_of_the_driver(tmp_path: Path) -> None:
    made = cuda_sdk.make(tmp_path / "scratch")
    include = made / "include"
    assert (include / "cuda.h").resolve() == tmp_path / "runtime" / "cuda.h"
    assert (include / "crt" / "host_defines.h").read_text() == "// triton\n"
    stub = made / "lib64" / "stubs" / "libcuda.so"
    symbols = subprocess.run(["nm", "-D", "--defined-only", stub], capture_output=True, text=True, check=True).stdout
    assert {"cuInit", "cuLaunchKernel"} <= set(symbols.split())
    assert b"libcuda.so.1\0" in stub.read_bytes()
    assert cuda_sdk.make(tmp_path / "scratch") == made
    assert sorted(path.name for path in (tmp_path / "scratch").iterdir()) == [made.name]


@pytest.mark.usefixtures("folders")
def test_host_code_gets_the_text_for_hosts(tmp_path: Path) -> None:
    """Of two texts, bare or in parentheses, as CUDA's headers write both."""
    source = """#include <nv/target>
int chosen() {
NV_IF_ELSE_TARGET(NV_PROVIDES_SM_90,
    asm("no" : "=h"(r), "f"(x));
,
    int seven = 7;
    return seven;
)
}
int bare() { NV_IF_ELSE_TARGET(NV_IS_HOST, (int pair[2] = {1, 2}; return pair[0];), (return 2;)) }
int none() { int x = 3; NV_IF_TARGET(NV_IS_DEVICE, x = 4;) return x; }
int main() { return chosen() * 100 + bare() * 10 + none() == 713 ? 0 : 1; }
"""
    made = cuda_sdk.make(tmp_path / "scratch")
    command = ["g++", "-std=c++20", f"-I{made / 'include'}", "-x", "c++", "-", "-o", str(tmp_path / "program")]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([tmp_path / "program"]).returncode == 0


def test_a_header_that_is_nowhere(tmp_path: Path, folders: list[Path]) -> None:
    (folders[1] / "crt" / "host_defines.h").unlink()
    with pytest.raises(CompileError, match=r"there is no crt/host_defines.h in .*runtime, .*triton") as caught:
        cuda_sdk.make(tmp_path / "scratch")
    assert caught.value.hint == "pip install triton, or nvidia-cuda-crt"


@pytest.mark.usefixtures("folders")
def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nope/g++")
    with pytest.raises(CompileError, match="/nope/g\\+\\+ does not run"):
        cuda_sdk.make(tmp_path / "scratch")
    assert not list((tmp_path / "scratch").iterdir())
