"""Modules without weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxc.models import ModelSource, instantiate


def made(make: Callable[[], nn.Module], dtype: str | None = None) -> Any:
    return instantiate(ModelSource("model", {}, {}, make, dtype=dtype))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight
        shared = nn.Parameter(torch.randn(4))
        self.first, self.second = shared, shared
        self.fixed = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.register_parameter("absent", None)
        self.table = nn.Buffer(torch.arange(4.0))
        self.angles = nn.Buffer(torch.arange(4.0) / 3, persistent=False)
        self.scalar = torch.tensor(2.5)


def test_parameters_are_meta_and_buffers_real() -> None:
    module = made(Block)
    assert all(p.is_meta and not p.requires_grad for p in module.parameters())
    assert [name for name, _ in module.named_parameters()] == ["first", "fixed", "embed.weight", "head.bias"]
    assert module.table.tolist() == [0, 1, 2, 3]
    assert module.angles.tolist() == (torch.arange(4.0) / 3).tolist()
    assert module.scalar.item() == 2.5
    assert not module.training


def test_tied_weights_stay_tied() -> None:
    module = made(Block, "bfloat16")
    assert module.head.weight is module.embed.weight
    assert module.first is module.second


def test_dtype_is_what_module_to_makes_of_it() -> None:
    module, eager = made(Block, "bfloat16"), Block().to(torch.bfloat16)
    for name, tensor in (*eager.named_parameters(), *eager.named_buffers()):
        assert dict((*module.named_parameters(), *module.named_buffers()))[name].dtype == tensor.dtype, name
    assert torch.equal(module.angles, eager.angles)
    assert module.fixed.dtype == torch.int64


class ReadsItself(nn.Module):
    """Its construction needs the values of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.tied = self.weight
        self.limit = float(self.weight.sum())


class DerivedBuffer(nn.Module):
    """A non-persistent buffer computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.doubled = nn.Buffer(self.weight.detach() * 2, persistent=False)


class DerivedAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.tables = {"doubled": self.weight.detach() * 2}


def test_values_read_while_constructing_are_right() -> None:
    module = made(ReadsItself)
    assert module.limit == 6.0
    assert module.weight.is_meta
    assert module.tied is module.weight
    assert made(DerivedBuffer).doubled.tolist() == [4, 4, 4]
    assert made(DerivedBuffer).weight.is_meta
    assert made(DerivedAttribute).tables["doubled"].tolist() == [4, 4, 4]


class LargeTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = torch.empty(2048, 1024)
        table[:] = torch.arange(1024)
        self.saved = nn.Buffer(table)
        self.table = nn.Buffer(table.clone(), persistent=False)


def test_large_buffers_that_are_not_saved_keep_their_values() -> None:
    assert made(LargeTable).table[5, 7].item() == 7


def test_hooks_and_modes_end_with_the_construction() -> None:
    made(Block)
    assert not nn.Linear(2, 2).weight.is_meta
    assert not torch.empty(2048, 1024).is_meta


def test_large_models_need_little_memory() -> None:
    code = """
        import re
        from pathlib import Path
        import torch
        from torch import nn
        from fxc.models import ModelSource, instantiate

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.Linear(8192, 28672)
                self.down = nn.Parameter(torch.randn(28672, 8192) * 0.02)
                self.norm = nn.Parameter(torch.ones(8192))

        make = lambda: nn.Sequential(*[Layer() for _ in range(80)])
        model = instantiate(ModelSource("m", {}, {}, make, dtype="bfloat16"))
        assert sum(p.numel() for p in model.parameters()) > 37e9
        # Not ru_maxrss, which begins with that of the process that started this one.
        print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 600  # MB, of which torch is 250
