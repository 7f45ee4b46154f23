"""What a manifest must say for a program to be made of it, beyond what the types of its fields do.

Texts are generated from it (`runtime.dispatch`) and sizes taken for granted, so a name has to be a name, and the parts
have to speak of the same things. fxc writes no other manifest: this is for those that somebody else has written.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Iterator

from fxc.errors import DamagedError
from fxc.manifest import Input, Manifest, Tensor
from fxc.shapes import dims_of, is_size

MOST = 2**63
"""Above any size of a dimension."""


def require_consistent(manifest: Manifest, where: str, is_dtype: Callable[[str], bool]) -> None:
    """`where` is named in the error.

    Raises:
        DamagedError: the first thing that no program can be made of.
    """
    wrong = next(_faults(manifest, is_dtype), "")
    if wrong:
        raise DamagedError(f"{where} makes no sense: {wrong}", "run `fxc build` again: it mends the artifact")


def _faults(manifest: Manifest, is_dtype: Callable[[str], bool]) -> Iterator[str]:
    if manifest.target.device not in ("cpu", "cuda"):
        yield f"target.device is {manifest.target.device!r}, expected cpu or cuda"
    yield from _programs(manifest)
    yield from _twice("input", (entry.name for entry in manifest.inputs))
    yield from _twice("weight", (entry.name for entry in (*manifest.weights, *manifest.constants)))
    for tensor in (*manifest.inputs, *manifest.weights, *manifest.constants):
        if not is_dtype(tensor.dtype):
            yield f"{tensor.name!r} has dtype {tensor.dtype!r}"
        if strange := [part for part in tensor.shape if not _is_size(part, tensor)]:
            yield f"{tensor.name!r} has size {strange[0]!r}"
    for entry in manifest.inputs:
        if not _is_name(entry.name):
            yield f"input {entry.name!r} cannot be a name"
    plain = {part for entry in manifest.inputs for part in entry.shape}
    for name in (name for entry in manifest.inputs for name in dims_of(entry.shape)):
        if name not in plain:
            yield f"no input has dimension {name!r} as a size by itself"
    for op in manifest.custom_ops:
        if not re.fullmatch(r"\w+::\w+(\.\w+)?", op.name):
            yield f"custom op {op.name!r} cannot be a name"


def _programs(manifest: Manifest) -> Iterator[str]:
    if not manifest.programs:
        yield "it has no programs"
        return
    dims = [name for name, _, _ in manifest.programs[0].range.bounds]
    yield from _twice("dimension", dims)
    for program in manifest.programs:
        if [name for name, _, _ in program.range.bounds] != dims:
            yield f"a program has dimensions {program.range.label!r}, another one {', '.join(dims)!r}"
        for name, low, high in program.range.bounds:
            if not _is_name(name) or not 0 <= low <= high < MOST:
                yield f"a program serves {name!r} from {low} to {high}"


def _twice(kind: str, names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{kind} {name!r} is there twice"
        seen.add(name)


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _is_size(part: int | str, tensor: Tensor) -> bool:
    """Only inputs have sizes that depend on dimensions."""
    if isinstance(part, int):
        return 0 <= part < MOST
    return isinstance(tensor, Input) and is_size(part) and all(map(_is_name, dims_of([part])))
