"""Weights in .safetensors files: headers are read at once, tensors when they are asked for. No pickle is ever read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from fxc.errors import WeightError

if TYPE_CHECKING:
    from fxc.manifest import Weight
    from fxc.runtime.weights import Problem

INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
"""Names of dtypes in a header, and torch's."""


class FileSource:
    """The tensors of one or more files. On cpu they stay mapped, private to the process; on cuda they are copied."""

    strict = True

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in chain.from_iterable(map(expand, paths)):
            opened = _open(path, device)
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if name in self._files:
                    raise WeightError(f"weight {name} is in two files, {self._files[name][0]} and {path}")
                self._files[name] = (path, opened)

    def names(self) -> Iterable[str]:
        return self._files

    def layout(self, name: str) -> tuple[tuple[int, ...], str]:
        header = self._files[name][1].get_slice(name)
        dtype = header.get_dtype()
        return tuple(header.get_shape()), DTYPES.get(dtype, dtype)

    def memory(self, name: str, weight: Weight, device: torch.device) -> Problem | None:
        return None

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name][1].get_tensor(name)
        # A file may put a tensor anywhere; what it maps there is not aligned to its own element size then.
        return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()


def expand(path: Path) -> list[Path]:
    """The files that a path stands for: itself, or those of a folder, by its index where it has one."""
    if path.is_dir():
        if (path / INDEX).is_file():
            return _indexed(path / INDEX)
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise WeightError(f"{path} holds no .safetensors file", "convert the checkpoint: pickled ones are not read")
        return found
    if path.name.endswith(".index.json"):
        return _indexed(path)
    return [path]


def _indexed(index: Path) -> list[Path]:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{index} is not an index of shards: {type(error).__name__} {error}") from None
    return [index.parent / shard for shard in sorted(shards)]


def _open(path: Path, device: torch.device) -> Any:
    try:
        return safe_open(str(path), framework="pt", device=str(device))
    except FileNotFoundError:
        raise WeightError(f"{path} does not exist, expected a .safetensors file") from None
    except (SafetensorError, OSError) as error:
        hint = "convert the checkpoint: pickled ones are not read" if path.suffix != ".safetensors" else ""
        raise WeightError(f"{path} cannot be read as .safetensors: {error}", hint) from None
