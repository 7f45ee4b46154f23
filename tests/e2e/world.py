"""What the end-to-end tests share: small models, and `fxc` run as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

TORTURE = bool(os.environ.get("FXC_TORTURE"))
"""The long forms: `scripts/torture`."""

FXC = (sys.executable, "-P", "-m", "fxc")

PLAIN = """import torch
from helper import SCALE
from torch import nn


class Plain(nn.Module):
    def __init__(self, width=16, op="relu"):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.second = nn.Linear(width, 16)
        self.op = getattr(torch, op)
        self.register_buffer("shift", torch.arange(16) / 16, persistent=False)

    def forward(self, x):
        return self.second(self.op(self.first(x))) * SCALE + self.shift
"""

PLAIN_YAML = """model:
  target: ./plain.py:Plain
  args: {width: 16}
device: cpu
inputs:
  x: {shape: [n, 16], dtype: float32}
dims:
  n: {min: 1, max: 64}
compile: {level: 1, sizes: [4]}
"""

OPS = """import torch


@torch.library.custom_op("mine::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("mine::reverse", mutates_args=())
def reverse(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@reverse.register_fake
def _(x):
    return torch.empty_like(x)
"""

MIXED = """import torch
from torch import nn

import fxc.ops
import ops


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.register_buffer("shift", torch.arange(16) / 16, persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, 3, 2, 8).unbind(1)
        y = torch.ops.fxc.attention(q, k, v).flatten(1)
        y = ops.reverse(torch.relu(ops.double(y)) + self.shift)
        return y.sin() * 3
"""

MIXED_YAML = """model:
  target: ./mixed.py:Mixed
device: cpu
inputs:
  x: {shape: [n, 16], dtype: float32}
dims:
  n: {min: 1, max: 64}
compile: {level: 1}
partition:
  splitting_ops: ["fxc::attention", "mine::reverse"]
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        assert self.out.count("\n") == 1, self
        return json.loads(self.out)

    @property
    def hash(self) -> str:
        assert self.code == 0, self
        return self.out.strip()


class Project(NamedTuple):
    """A folder with model.yaml, and a cache."""

    folder: Path
    cache: Path

    @property
    def yaml(self) -> Path:
        return self.folder / "model.yaml"

    @property
    def root(self) -> Path:
        return self.cache / "v1"

    def artifact(self, hash: str) -> Path:
        return self.root / "artifacts" / hash

    def environ(self, **more: str) -> dict[str, str]:
        return {**os.environ, "FXC_CACHE_DIR": str(self.cache), **more}

    def fxc(self, *arguments: str, environ: Mapping[str, str] | None = None, **options: Any) -> Result:
        start = time.perf_counter()
        done = subprocess.run(
            [*FXC, *arguments], env={**self.environ(), **(environ or {})}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=400, check=False, **options,
        )  # fmt: skip
        return Result(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)

    def build(self, *arguments: str, environ: Mapping[str, str] | None = None) -> Any:
        """`build --json`, which must succeed."""
        done = self.fxc("build", str(self.yaml), "--json", *arguments, environ=environ)
        assert done.code == 0, done
        return done.json

    def start(
        self, *arguments: str, verb: str = "build", more: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """`fxc build` in a session of its own, not waited for."""
        return subprocess.Popen(
            [*FXC, verb, str(self.yaml), "--json", *arguments], env=self.environ(**(more or {})), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options,
        )  # fmt: skip

    def python(self, code: str, *arguments: str, environ: Mapping[str, str] | None = None) -> Result:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=self.environ() if environ is None else {**environ},
            cwd="/", capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        return Result(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)

    def processes(self) -> list[str]:
        """Command lines of the living processes that were started for this cache."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    if os.fsencode(self.cache) in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                except OSError:
                    continue
        return [line for line in found if line]

    def settle(self, seconds: float = 60) -> list[str]:
        """Wait for those processes to end; what is left then."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return left


def make(folder: Path, cache: Path, files: Mapping[str, str]) -> Project:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return Project(folder, cache)


def plain(folder: Path, cache: Path) -> Project:
    return make(folder, cache, {"plain.py": PLAIN, "helper.py": "SCALE = 2.0\n", "model.yaml": PLAIN_YAML})


def mixed(folder: Path, cache: Path) -> Project:
    return make(folder, cache, {"mixed.py": MIXED, "ops.py": OPS, "model.yaml": MIXED_YAML})


def copy_cache(cache: Path, to: Path, *, scratch: bool = False) -> Path:
    """A copy that shares no bytes with the original; hard links within it stay. With `scratch`, only the compiler's
    headers, which are shared: a cache in which nothing is built, but building is quick."""
    (to / "v1").mkdir(parents=True, mode=0o700)
    if scratch:
        shutil.copytree(cache / "v1" / "scratch", to / "v1" / "scratch", copy_function=os.link)
    else:
        kept = [str(path) for path in (cache / "v1").iterdir() if path.name not in ("scratch", "staging")]
        subprocess.run(["cp", "-a", *kept, str(to / "v1")], check=True)
    return to
