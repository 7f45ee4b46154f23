"""A server: no environment, no compiler, a cache that was moved and cannot be written. Nothing of the build side is
imported, at load or at the first call."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Built

SERVER = """
import sys
ref, folder, register = sys.argv[1:]
sys.path.insert(0, folder)
sys.dont_write_bytecode = True
if register:
    __import__(register)  # what registers the ops, as a server does
import fxc, torch
program = fxc.load(ref)
heavy = ["torch._dynamo", "torch._inductor", "sympy", "triton", "transformers"]
weights = {w.name: torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) for w in program.manifest.weights}
program.bind(weights)
results = []
for n in (1, 4, 5, 64):
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(n))
    results.append((x, program(x)))
print(*[name for name in heavy if name in sys.modules])
name, cls = (("mixed", "Mixed") if register else ("plain", "Plain"))
model = getattr(__import__(name), cls)().eval()
model.load_state_dict(weights)
with torch.no_grad():
    print(max(float((model(x) - y).abs().max()) for x, y in results))
"""


@pytest.fixture
def bare(plain: Built, mixed: Built, tmp_path: Path) -> Callable[[str, Built, str], float]:
    """Runs SERVER with nothing around it; the largest error."""

    def run(ref: str, built: Built, register: str) -> float:
        done = built.project.python(SERVER, ref, str(built.project.folder), register, environ={})
        assert done.code == 0, done
        imported, error = done.out.split("\n")[:2]
        assert imported == ""
        return float(error)

    return run


def moved_read_only(built: Built, tmp_path: Path) -> Path:
    """The artifact alone, elsewhere, on a file system that is mounted read-only where that is possible."""
    place = tmp_path / "moved here" / "artifact"
    shutil.copytree(built.artifact, place)
    subprocess.run(["chmod", "-R", "a-w", str(place)], check=True)
    return place


@pytest.mark.parametrize("which", ["plain", "mixed"])
def test_bare_server(which: str, plain: Built, mixed: Built, bare: Callable[..., float], tmp_path: Path) -> None:
    built = {"plain": plain, "mixed": mixed}[which]
    place = moved_read_only(built, tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in place.rglob("*"))
    assert bare(str(place), built, "ops" if which == "mixed" else "") < 1e-5
    assert sorted((path, path.stat().st_mtime_ns) for path in place.rglob("*")) == before
    subprocess.run(["chmod", "-R", "u+w", str(place)], check=True)


def test_by_model_yaml_without_compiler(mixed: Built) -> None:
    """It registers the ops itself, since it knows where they are."""
    code = "import fxc, sys; print(fxc.load(sys.argv[1], cache_dir=sys.argv[2]).manifest.hash)"
    project = mixed.project
    done = project.python(code, str(project.yaml), str(project.cache), environ={"CXX": "/nonexistent"})
    assert (done.code, done.out.strip()) == (0, mixed.hash), done


def test_unregistered_op_is_named(mixed: Built) -> None:
    code = "import fxc, sys; fxc.load(sys.argv[1])"
    done = mixed.project.python(code, str(mixed.artifact), environ={})
    assert done.code == 1
    assert "the program calls the op mine::double, which is not registered; mixed.py registers it" in done.err


def test_keeps_working_when_the_cache_is_deleted(copied: Callable[[Built], Built], plain: Built) -> None:
    code = """
import fxc, shutil, sys, torch
program = fxc.load(sys.argv[1])
program.bind({w.name: torch.ones(w.shape) for w in program.manifest.weights})
shutil.rmtree(sys.argv[2])
print(program(torch.ones(3, 16)).shape)
"""
    built = copied(plain)
    done = built.project.python(code, built.hash, str(built.project.cache))
    assert done.out == "torch.Size([3, 16])\n", done
