from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from fxc import machine
from fxc.errors import IncompatibleError
from fxc.target import X86_64_V3, Target
from tests.cache.conftest import make_binary, make_manifest

CPU = Target(device="cpu", arch="x86_64", cpu_features=("avx2", "fma"), torch="2.13.0+cpu", compiler="g++ 12.2.0")
CUDA = Target(
    device="cuda",
    arch="x86_64",
    cpu_features=X86_64_V3,
    torch="2.13.0+cu130",
    triton="3.6.0",
    cuda="13.0",
    compute_capability=(9, 0),
    properties={"multi_processor_count": 132},
    compiler="g++ 12.2.0",
)


def rejected(target: Target, here: Target) -> list[str]:
    return [verdict.name for verdict in machine.fits(target, here) if not verdict.accepted]


@pytest.mark.parametrize(
    ("base", "change", "expected"),
    [
        (CPU, {}, []),
        (CPU, {"cpu_features": ("avx2", "avx512f", "fma")}, []),
        (CPU, {"torch": "2.13.1"}, []),
        (CPU, {"compiler": ""}, []),
        (CPU, {"cpu_features": ("avx2",)}, ["cpu_features"]),
        (CPU, {"cpu_features": ()}, ["cpu_features"]),
        (CPU, {"torch": "2.14.0+cpu"}, ["torch"]),
        (CPU, {"torch": "3.13.0+cpu"}, ["torch"]),
        (CPU, {"torch": "2.130.0+cpu"}, ["torch"]),
        (CPU, {"arch": "aarch64", "cpu_features": ("asimd",)}, ["arch", "cpu_features"]),
        (CUDA, {}, []),
        (CUDA, {"cuda": "13.2"}, []),
        (CUDA, {"triton": "", "compiler": ""}, []),
        (CUDA, {"properties": {"multi_processor_count": 114}}, []),
        (CUDA, {"cuda": "12.8"}, ["cuda"]),
        (CUDA, {"cuda": ""}, ["cuda"]),
        (CUDA, {"compute_capability": (8, 0)}, ["compute_capability"]),
        (CUDA, {"compute_capability": (9, 1)}, ["compute_capability"]),
        (CUDA, {"cpu_features": ("abm", "avx", "sse4_2")}, ["cpu_features"]),
        (CUDA, {"cpu_features": (*X86_64_V3, "avx512f")}, []),
        (CUDA, {"device": "cpu", "compute_capability": None, "cuda": ""}, ["device"]),
    ],
)
def test_what_fits(base: Target, change: dict[str, object], expected: list[str]) -> None:
    assert rejected(base, msgspec.structs.replace(base, **change)) == expected


def test_facts_that_are_checked() -> None:
    assert [verdict.name for verdict in machine.fits(CPU, CPU)] == ["device", "arch", "torch", "cpu_features"]
    assert [verdict.name for verdict in machine.fits(CUDA, CUDA)] == [
        "device",
        "arch",
        "torch",
        "cpu_features",
        "compute_capability",
        "cuda",
    ]


OFFERS = {"GLIBC": "2.36", "GLIBCXX": "3.4.30"}


@pytest.mark.parametrize("target", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize(
    ("needs", "offers", "expected"),
    [
        ({}, OFFERS, []),
        (OFFERS, OFFERS, []),
        ({"GLIBC": "2.4", "GLIBCXX": "3.4.9"}, OFFERS, []),
        ({"GLIBC": "2.38"}, OFFERS, ["GLIBC"]),
        ({"GLIBC": "2.36.1"}, OFFERS, ["GLIBC"]),
        ({"GLIBC": "2.34", "GLIBCXX": "3.4.31"}, OFFERS, ["GLIBCXX"]),
        ({"GLIBC": "3.0", "GLIBCXX": "4.0"}, OFFERS, ["GLIBC", "GLIBCXX"]),
        ({"GLIBC": "2.38"}, {}, []),
    ],
)
def test_libraries_that_fit(target: Target, needs: dict[str, str], offers: dict[str, str], expected: list[str]) -> None:
    verdicts = machine.fits(target, target, needs, offers)
    assert [verdict.name for verdict in verdicts if not verdict.accepted] == expected


def test_an_old_library_is_named_with_both_versions() -> None:
    with pytest.raises(IncompatibleError, match=r"GLIBC: built for 2\.38, here 2\.36 \(older than"):
        machine.require_fit(CPU, CPU, {"GLIBC": "2.38"}, OFFERS)


def test_what_a_library_needs() -> None:
    data = b"\0GLIBC_2.14\0GLIBC_2.4\0GLIBCXX_3.4.9\0GLIBCXX_3.4.30\0GLIBC_PRIVATE\0CXXABI_1.3\0xGLIBC_9.9\0"
    assert machine.needed(data) == {"GLIBC": "2.14", "GLIBCXX": "3.4.30"}
    assert machine.needed(b"\x7fELF") == {}


def test_libraries_of_this_machine() -> None:
    """torch has loaded the C++ library; what it needs itself is offered."""
    found = machine.libraries()
    needed = machine.needed((Path(torch.__file__).parent / "lib/libc10.so").read_bytes())
    assert {"GLIBC", "GLIBCXX"} <= needed.keys()
    assert all(machine.newest(found[name], version) == found[name] for name, version in needed.items())


def test_an_artifact_needs_what_its_binaries_need() -> None:
    binaries = {
        name: msgspec.structs.replace(make_binary(), needs={"GLIBC": version})
        for name, version in (("a", "2.4"), ("b", "2.34"), ("c", "2.14"))
    }
    manifest = msgspec.structs.replace(make_manifest(), binaries={**binaries, "old": make_binary()})
    assert machine.needs_of(manifest) == {"GLIBC": "2.34"}
    assert machine.needs_of(make_manifest()) == {}


def test_what_does_not_fit_is_refused_fact_by_fact() -> None:
    machine.require_fit(CPU, CPU)
    here = msgspec.structs.replace(CPU, cpu_features=("avx2",), torch="2.14.1+cpu")
    with pytest.raises(IncompatibleError) as caught:
        machine.require_fit(CPU, here)
    assert caught.value.message == (
        "the artifact does not fit this machine: "
        "torch: built for 2.13.0+cpu, here 2.14.1+cpu (another minor version); "
        "cpu_features: built for avx2 fma, here avx2 (this CPU lacks fma)"
    )
    assert caught.value.exit_code == 4


def test_probe_cpu() -> None:
    found = machine.probe("cpu")
    assert (found.device, found.torch, found.cuda, found.triton) == ("cpu", torch.__version__, "", "")
    assert (found.compute_capability, found.properties) == (None, {})
    assert list(found.cpu_features) == sorted(found.cpu_features)
    assert machine.probe("cpu", compiler=False) == msgspec.structs.replace(found, compiler="")
    assert rejected(found, found) == []


def test_a_target_for_cuda_says_less_than_this_cpu_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built is for any server; what is held against it is this machine."""
    monkeypatch.setattr(machine, "probe", lambda device, compiler: CUDA)
    monkeypatch.setattr(machine, "_features", lambda: ("avx", "avx2"))
    assert machine.here("cuda").cpu_features == ("avx", "avx2")
    assert (CUDA.march, CPU.march) == ("x86-64-v3", "")


def test_probe_cpu_imports_no_torch() -> None:
    code = "import sys; from fxc.machine import probe; probe('cpu'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_probe_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(major=9, minor=0, name="NVIDIA H200", multi_processor_count=132, total_memory=150754820096)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(machine, "torch_version", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: {"triton": "3.6.0"}[package])
    monkeypatch.setattr(machine, "_arch", lambda: "x86_64")
    for device in ("cuda", "cuda:1"):
        found = machine.probe(device)
        assert (found.device, found.cuda, found.triton, found.cpu_features) == ("cuda", "13.0", "3.6.0", X86_64_V3)
        assert found.compute_capability == (9, 0)
        assert found.properties == {"name": "NVIDIA H200", "multi_processor_count": 132}
    with pytest.raises(IncompatibleError, match="there is no device cuda:2: this machine has 2"):
        machine.probe("cuda:2")


def test_a_target_for_cuda_on_arm_is_the_builders_own_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host code is compiled for it: there is no level that all servers have."""
    monkeypatch.setattr(machine, "_gpu", lambda index: ((9, 0), {}))
    monkeypatch.setattr(machine, "_arch", lambda: "aarch64")
    monkeypatch.setattr(machine, "_features", lambda: ("asimd", "bf16", "sve"))
    built, found = machine.probe("cuda", compiler=False), machine.here("cuda")
    assert (built.arch, built.cpu_features, built.march) == ("aarch64", ("asimd", "bf16", "sve"), "")
    assert (found, rejected(built, found)) == (built, [])
    monkeypatch.setattr(machine, "_features", lambda: ("asimd", "bf16"))
    assert rejected(built, machine.here("cuda")) == ["cpu_features"]


def test_probe_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(IncompatibleError, match="there is no CUDA device") as caught:
        machine.probe("cuda")
    assert caught.value.hint == "`fxc doctor` tells more"


@pytest.mark.parametrize("device", ["mps", "", "CPU"])
def test_probe_of_another_device(device: str) -> None:
    with pytest.raises(IncompatibleError, match="expected cpu or cuda"):
        machine.probe(device)


def test_torch_version_is_torchs_own() -> None:
    assert machine.torch_version() == (torch.__version__, torch.version.cuda or "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n", ("2.13.0+cu130", "13.0")),
        ("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n", ("2.11.0+cpu", "")),
        ("__version__ = '2.15.0a0'\ncuda = '13.2'\nhip = '7.1'\n", ("2.15.0a0", "13.2")),
        ("__version__ = '2.13.0'\ncuda: str | None = '13.0'\n", ("2.13.0", "13.0")),
    ],
)
def test_torchs_version_file(text: str, expected: tuple[str, str]) -> None:
    assert machine.parse_torch_version(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022\n", "g++ 12.2.0"),
        ("g++-13 (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0\n", "g++-13 13.3.0"),
        ("x86_64-conda-linux-gnu-c++ (conda-forge gcc 14.2.0-1) 14.2.0\n", "x86_64-conda-linux-gnu-c++ 14.2.0"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)\nTarget: x86_64\n", "clang 18.1.3"),
        ("mine\n", "mine"),
        ("", ""),
    ],
)
def test_compilers(text: str, expected: str) -> None:
    assert machine.parse_compiler(text) == expected


def test_the_compiler_is_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\necho "mine ($1) 1.2.3"\n')
    script.chmod(0o700)
    for command, expected in ((f"{script} --wrapped", "mine 1.2.3"), (str(tmp_path / "absent"), ""), ("false", "")):
        machine.compiler_version.cache_clear()
        monkeypatch.setenv("CXX", command)
        assert machine.compiler_version() == expected
    machine.compiler_version.cache_clear()


X86 = """processor\t: 0
vendor_id\t: GenuineIntel
flags\t\t: fpu sse sse2 ssse3 fma sse4_1 sse4_2 popcnt aes avx f16c avx2 bmi1 bmi2 avx512f avx512_bf16 \
avx_vnni amx_tile sha_ni
vmx flags\t: avx512vl

processor\t: 1
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes atomics fphp asimdhp cpuid sve i8mm bf16\n"


def test_features() -> None:
    expected = "amx_tile avx avx2 avx512_bf16 avx512f avx_vnni bmi1 bmi2 f16c fma popcnt sse4_1 sse4_2 ssse3"
    assert machine.parse_features(X86, "x86_64") == tuple(expected.split())
    assert machine.parse_features(ARM, "aarch64") == ("asimd", "asimdhp", "atomics", "bf16", "fphp", "i8mm", "sve")
    assert machine.parse_features("", "x86_64") == ()
