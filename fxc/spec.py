"""What to build: model.yaml as frozen structs. Reading and checking; nothing here imports torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from fxc.errors import SpecError
from fxc.shapes import Range, general_ranges, size_range

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
)  # fmt: skip
Dtype = Literal[
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
]  # fmt: skip

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of every section: unknown keys are errors, defaults are left out when written."""


class ModelSpec(_Section):
    """Where the model comes from: `target` or `huggingface`."""

    target: str | None = None
    """`FILE.py:NAME`, relative to model.yaml, or `package.module:NAME`; a class or factory that returns an nn.Module."""
    args: dict[str, Any] = {}
    """Keyword arguments for the target."""
    huggingface: str | None = None
    """A folder with config.json, relative to model.yaml; weights are not needed to build."""
    dtype: Dtype | None = None
    """Dtype that floating-point parameters and buffers are cast to; as the target makes them when absent."""


class InputSpec(_Section):
    """One argument of `forward`."""

    shape: tuple[NonNegative | str, ...]
    """Integers and names of `dims`."""
    dtype: Dtype
    values: tuple[float, float] | None = None
    """Half-open range that made-up inputs are drawn from; 0 and 1 for integers, a normal for floats when absent."""


class DimSpec(_Section):
    """Bounds of a dynamic dimension, both included."""

    min: NonNegative
    max: Positive


class CompileSpec(_Section):
    sizes: tuple[Positive | dict[str, Positive], ...] = ()
    """Values of the dynamic dimension(s) that get a program of their own."""
    ranges: tuple[Positive | dict[str, Positive], ...] = ()
    """Inner boundaries of the general program: 256 cuts 1..8192 into 1..256 and 257..8192."""
    level: Literal[0, 1, 2, 3] = 2
    """0: pieces run eagerly; 1: the general program only; 2: sizes too; 3: sizes tuned."""


class PartitionSpec(_Section):
    splitting_ops: tuple[str, ...] = ("fxc::attention",)
    """Qualified op names the graph is cut at; an overload may be named, `aten::mm.out`."""


class CudagraphSpec(_Section):
    mode: Literal["none", "piecewise", "full", "full_and_piecewise"] = "full_and_piecewise"
    sizes: tuple[Positive | dict[str, Positive], ...] | None = None
    """Sizes that are captured; `compile.sizes` when absent."""


class Spec(_Section):
    """The contents of model.yaml."""

    model: ModelSpec
    device: Literal["cpu", "cuda"]
    inputs: dict[str, InputSpec] = {}
    dims: dict[str, DimSpec] = {}
    compile: CompileSpec = CompileSpec()
    partition: PartitionSpec = PartitionSpec()
    passes: dict[str, Any] = {}
    """Options per pass, by its name; `custom` lists a user's own as `package.module:Pass`."""
    cudagraph: CudagraphSpec = CudagraphSpec()

    def sizes(self) -> tuple[Range, ...]:
        """`compile.sizes` as boxes with one point, without repeats; none below level 2."""
        if self.compile.level < 2:
            return ()
        found = (size_range(self.dims, named) for named in named_values(self, self.compile.sizes, "compile.sizes"))
        return tuple(dict.fromkeys(found))

    def ranges(self) -> tuple[Range, ...]:
        """The boxes of the general program."""
        bounds = {name: (dim.min, dim.max) for name, dim in self.dims.items()}
        cuts = named_values(self, self.compile.ranges, "compile.ranges")
        return general_ranges(bounds, [pair for cut in cuts for pair in cut.items()])


def named_values(spec: Spec, values: Iterable[int | Mapping[str, int]], key: str) -> list[dict[str, int]]:
    """Sizes or boundaries with their dimension names: 8 is {num_tokens: 8} where there is one dimension."""
    named: list[dict[str, int]] = []
    for value in values:
        if isinstance(value, int):
            if len(spec.dims) != 1:
                raise SpecError(
                    f"{key}: {value} does not say which dimension; there are {len(spec.dims)}",
                    f"write a mapping, {{{', '.join(f'{name}: {value}' for name in spec.dims)}}}",
                )
            value = {next(iter(spec.dims)): value}
        named.append(dict(value))
    return named


def load_spec(path: Path, overrides: Iterable[str] = ()) -> Spec:
    """Read model.yaml, apply `--set KEY=VALUE` overrides, check everything that needs no model.

    Raises:
        SpecError: one line that names file, key and value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise SpecError(f"{path} is a directory, expected a YAML file") from None
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path}: expected a mapping with the key `model`, found {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    return parse_spec(data, str(path))


def parse_spec(data: Mapping[str, Any], where: str = "spec") -> Spec:
    """Turn plain data (as YAML gives it) into a checked Spec; `where` is named in errors."""
    try:
        spec = msgspec.convert(data, Spec)
    except msgspec.ValidationError as error:
        raise _explain(error, data, where) from None
    _check(spec, where)
    return spec


def to_data(spec: Spec) -> dict[str, Any]:
    """Plain data that `parse_spec` reads back; defaults left out."""
    data: dict[str, Any] = msgspec.to_builtins(spec)
    return data


def json_schema() -> dict[str, Any]:
    """JSON schema of model.yaml, for editors."""
    return msgspec.json.schema(Spec)


def _override(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise SpecError(f"--set {override}: expected KEY=VALUE", "for example --set compile.level=1")
    *parents, last = key.split(".")
    node: Any = data
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise SpecError(f"--set {override}: {part} is not a mapping")
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise SpecError(f"--set {override}: the value is not YAML: {' '.join(str(error).split())}") from None


def _fail(where: str, key: str, message: str, hint: str = "") -> SpecError:
    return SpecError(f"{where}: {key}: {message}", hint)


def _check(spec: Spec, where: str) -> None:
    """What the types cannot say."""
    if (spec.model.target is None) == (spec.model.huggingface is None):
        raise _fail(where, "model", "expected either `target` or `huggingface`, and not both")
    if spec.model.target is not None and ":" not in spec.model.target:
        raise _fail(where, "model.target", f"{spec.model.target!r} names no class", "write FILE.py:NAME or package.module:NAME")
    if spec.model.target is not None and not spec.inputs:
        raise _fail(where, "inputs", "missing; list forward's arguments with shape and dtype")
    for name, entry in spec.inputs.items():
        for part in entry.shape:
            if isinstance(part, str) and part not in spec.dims:
                near = nearest(part, spec.dims)
                raise _fail(
                    where, f"inputs.{name}.shape", f"dimension {part!r} has no bounds",
                    f"did you mean {near!r}?" if near else f"add `{part}: {{min: 1, max: ...}}` to dims",
                )  # fmt: skip
        if entry.values is not None and not entry.values[0] < entry.values[1]:
            raise _fail(where, f"inputs.{name}.values", f"{list(entry.values)} is empty", "write [low, high] with low < high")
    used = {part for entry in spec.inputs.values() for part in entry.shape if isinstance(part, str)}
    for name, dim in spec.dims.items():
        if dim.min > dim.max:
            raise _fail(where, f"dims.{name}", f"min {dim.min} is above max {dim.max}")
        if spec.inputs and name not in used:
            raise _fail(where, f"dims.{name}", "no input has this dimension", "use it in a shape or remove it")
        if not name.isidentifier():
            raise _fail(where, f"dims.{name}", "not a name", "use letters, digits and underscores")
    for key, values in (("compile.sizes", spec.compile.sizes), ("compile.ranges", spec.compile.ranges), ("cudagraph.sizes", spec.cudagraph.sizes or ())):
        if not spec.dims and (spec.inputs or not values):
            if values:
                raise _fail(where, key, "there is no dynamic dimension to give a size to", "name one in dims")
            continue
        if spec.dims:
            _check_sizes(spec, where, key, values)


def _check_sizes(spec: Spec, where: str, key: str, values: Iterable[int | dict[str, int]]) -> None:
    try:
        named = named_values(spec, values, key)
    except SpecError as error:
        raise SpecError(f"{where}: {error.message}", error.hint) from None
    for size in named:
        for name, value in size.items():
            if name not in spec.dims:
                near = nearest(name, spec.dims)
                raise _fail(where, key, f"unknown dimension {name!r}", f"did you mean {near!r}?" if near else "")
            dim = spec.dims[name]
            if not dim.min <= value <= dim.max:
                raise _fail(where, key, f"{value} is outside {name}'s bounds {dim.min} to {dim.max}", f"change dims.{name} or the size")
        missing = [name for name in spec.dims if name not in size]
        if missing and key != "compile.ranges":
            raise _fail(where, key, f"{size} gives no value for {', '.join(missing)}")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest in spelling, if one is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")


def _explain(error: msgspec.ValidationError, data: Mapping[str, Any], where: str) -> SpecError:
    """msgspec's message with the key, the value that came, and the nearest valid key."""
    text = str(error)
    match = _PATH.search(text)
    path = match["path"] if match else ""
    text = _PATH.sub("", text)
    parts = [part for part in re.split(r"[.\[\]]+", path) if part]
    if unknown := _UNKNOWN.search(text):
        field = unknown["field"]
        key = ".".join([*parts, field])
        known = _fields(parts)
        near = nearest(field, known)
        hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(known)}"
        return _fail(where, key, "unknown key", hint)
    if missing := _MISSING.search(text):
        return _fail(where, ".".join([*parts, missing["field"]]), "missing")
    value: Any = data
    for part in parts:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return _fail(where, path or "spec", text)  # msgspec writes `[...]` for a key of a mapping: no value to show
    return _fail(where, path or "spec", f"{value!r}: {text[0].lower()}{text[1:]}")


def _fields(parts: list[str]) -> list[str]:
    sections: dict[str, type[msgspec.Struct]] = {
        "model": ModelSpec, "inputs": InputSpec, "dims": DimSpec, "compile": CompileSpec,
        "partition": PartitionSpec, "cudagraph": CudagraphSpec,
    }  # fmt: skip
    return [field.encode_name for field in msgspec.structs.fields(sections[parts[0]] if parts else Spec)]
