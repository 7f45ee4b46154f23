"""What to build: model.yaml as frozen structs. Reading and checking; nothing here imports torch."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fxc import yaml_text
from fxc.convert import convert, shown, suggest
from fxc.errors import SpecError
from fxc.shapes import Range, dims_of, general_ranges, parse_size, size_at, size_ranges

Dtype = Literal[
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
]  # fmt: skip

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TOKENS, REQUESTS = "num_tokens", "num_requests"
"""Dimensions of a model with `kv_cache`. A size of 8 means 8 tokens, of any number of requests, and, that attention
may be made for it, of 8 requests that decode."""
MOST_ELEMENTS = 2**45
"""Of an input: 2**48 bytes of the widest dtype, more than a process can address."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of every section: unknown keys are errors, defaults are left out when written."""


class ModelSpec(_Section, frozen=True):
    """Where the model comes from: `target` or `huggingface`."""

    target: str | None = None
    """`FILE.py:NAME`, relative to model.yaml, or `package.module:NAME`; a class or factory of an nn.Module."""
    args: dict[str, Any] = {}
    """Keyword arguments for the target."""
    huggingface: str | None = None
    """A folder with config.json, relative to model.yaml; weights are not needed to build."""
    dtype: Dtype | None = None
    """Dtype that floating-point parameters and buffers are cast to; as the target makes them when absent."""


class InputSpec(_Section, frozen=True):
    """One argument of `forward`."""

    shape: tuple[NonNegative | str, ...]
    """Integers, names of `dims`, and such names with a number added: `num_requests + 1`."""
    dtype: Dtype
    values: tuple[float, float] | None = None
    """Half-open range that made-up inputs are drawn from; 0 and 1 for integers, a normal for floats when absent.
    Integers repeat only where the range has not enough of them."""
    pad: int | Literal["last"] | None = None
    """What rows are filled with where a batch is smaller than a captured size: a number, or the last row's value.
    Batches are padded only if all inputs say with what: that a pad row changes no other row is for the model to see."""
    bound: bool = False
    """Handed over once, with `Program.bind_inputs`, and not with each call: a cache, say."""


class DimSpec(_Section, frozen=True):
    """Bounds of a dynamic dimension, both included."""

    min: NonNegative
    max: Positive


class KVCacheSpec(_Section, frozen=True):
    """That a causal language model keeps keys and values in blocks: `fxc::attention.paged`, and the inputs it needs."""

    block_size: Positive = 16
    """Tokens in a block."""
    max_tokens: Positive | None = None
    """Longest sequence, prompt and answer; the model's `max_position_embeddings` when absent."""


class CompileSpec(_Section, frozen=True):
    sizes: tuple[Positive | dict[str, Positive], ...] = ()
    """Values of the dynamic dimension(s) that get a program of their own; a mapping may leave dimensions free."""
    ranges: tuple[Positive | dict[str, Positive], ...] = ()
    """Inner boundaries of the general program: 256 cuts 1..8192 into 1..256 and 257..8192."""
    level: Literal[0, 1, 2, 3] = 2
    """0: pieces run eagerly; 1: the general program only; 2: sizes too; 3: sizes tuned."""


class PartitionSpec(_Section, frozen=True):
    splitting_ops: tuple[str, ...] = ("fxc::attention",)
    """Qualified op names the graph is cut at; an overload may be named, `aten::mm.out`."""


class CudagraphSpec(_Section, frozen=True):
    mode: Literal["none", "piecewise", "full", "full_and_piecewise"] = "full_and_piecewise"
    sizes: tuple[Positive | dict[str, Positive], ...] | None = None
    """Sizes that are captured; `compile.sizes` when absent."""


class Spec(_Section, frozen=True):
    """The contents of model.yaml."""

    model: ModelSpec
    device: Literal["cpu", "cuda"]
    inputs: dict[str, InputSpec] = {}
    dims: dict[str, DimSpec] = {}
    kv_cache: KVCacheSpec | None = None
    """For `model.huggingface` alone."""
    compile: CompileSpec = CompileSpec()
    partition: PartitionSpec = PartitionSpec()
    passes: dict[str, Any] = {}
    """Options per pass, by its name; `custom` lists a user's own as `package.module:Pass`."""
    cudagraph: CudagraphSpec = CudagraphSpec()

    def sizes(self) -> tuple[Range, ...]:
        """The boxes of `compile.sizes`, in order, without repeats; none below level 2."""
        if self.compile.level < 2:
            return ()
        named = named_values(self, self.compile.sizes, "compile.sizes")
        return tuple(sorted({box for size in named for box in size_ranges(size, self.ranges())}))

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
            if spec.kv_cache is not None:
                most = spec.dims[REQUESTS].max if REQUESTS in spec.dims else value
                if key != "compile.ranges" and value <= most:
                    named.append({TOKENS: value, REQUESTS: value})
                value = {TOKENS: value}
            elif len(spec.dims) != 1:
                raise SpecError(
                    f"{key}: {value} does not say which dimension; there are {len(spec.dims)}",
                    f"write a mapping, {{{', '.join(f'{name}: {value}' for name in spec.dims)}}}",
                )
            else:
                value = {next(iter(spec.dims)): value}
        named.append(dict(value))
    return named


def load_spec(path: Path, overrides: Iterable[str] = (), level: int | None = None) -> Spec:
    """Read model.yaml, apply `--set KEY=VALUE` overrides and the level, check everything that needs no model.

    Raises:
        SpecError: one line that names file, key and value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise SpecError(f"{path} is a directory, expected a YAML file") from None
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    data = yaml_text.read(text, str(path))
    if data is None:
        raise SpecError(f"{path} is empty, expected a mapping with the keys model and device")
    if not isinstance(data, dict):
        raise SpecError(f"{path}: {shown(data)} is not a mapping; expected one with the keys model and device")
    for override in (*overrides, *([] if level is None else [f"compile.level={level}"])):
        _override(data, override)
    return parse_spec(data, str(path))


def parse_spec(data: Mapping[str, Any], where: str = "spec") -> Spec:
    """Turn plain data (as YAML gives it) into a checked Spec; `where` is named in errors."""
    spec = convert(data, Spec, where)
    check_spec(spec, where)
    return spec


def to_data(spec: Spec) -> dict[str, Any]:
    """Plain data that `parse_spec` reads back; defaults left out."""
    data: dict[str, Any] = msgspec.to_builtins(spec)
    return data


def json_schema() -> dict[str, Any]:
    """JSON schema of model.yaml, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "model.yaml of fxc",
        **msgspec.json.schema(Spec),
    }


def _override(data: dict[str, Any], override: str) -> None:
    """Apply one `--set KEY=VALUE`; the value is read as YAML, so 8, true, [1, 2] and text come with their types."""
    key, separator, value = override.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise SpecError(f"--set {override}: expected KEY=VALUE", "for example --set compile.level=1")
    node: Any = data
    for depth, part in enumerate(parts[:-1], 1):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise SpecError(f"--set {override}: {'.'.join(parts[:depth])} is {shown(node)}, not a mapping")
    node[parts[-1]] = yaml_text.read(value, f"--set {override}")


def check_spec(spec: Spec, where: str) -> None:
    """What the types cannot say. To be called again when `inputs` and `dims` come from a Hugging Face config.

    Raises:
        SpecError: names `where`, the key and the value.
    """
    _check_model(spec, where)
    for name in spec.inputs:
        _check_name(name, f"inputs.{name}", where)
    for name in spec.dims:
        _check_name(name, f"dims.{name}", where)
        if name in _FUNCTIONS:
            raise _fail(where, f"dims.{name}", f"{name!r} is used in expressions of sizes", "choose another name")
    for name, entry in spec.inputs.items():
        _check_input(spec, name, entry, where)
    used = {name for entry in spec.inputs.values() for name in dims_of(entry.shape)}
    plain = {part for entry in spec.inputs.values() for part in entry.shape}
    for name, dim in spec.dims.items():
        if dim.min > dim.max:
            raise _fail(where, f"dims.{name}", f"min {dim.min} is above max {dim.max}")
        if spec.inputs and name not in used:
            raise _fail(where, f"dims.{name}", "no input has this dimension", "use it in a shape or remove it")
        if name in used - plain:
            raise _fail(where, f"dims.{name}", "no input has it as a size by itself", "its value is read off that one")
    for key, values in _size_lists(spec):
        _check_sizes(spec, where, key, values)
    for op in spec.partition.splitting_ops:
        if not _OP.fullmatch(op):
            hint = "write namespace::op, for example fxc::attention"
            raise _fail(where, "partition.splitting_ops", f"{op!r} is not the qualified name of an op", hint)
    _check_passes(spec, where)


_WHOLE: dict[str, tuple[float, float]] = {
    "bool": (0, 2), "uint8": (0, 2**8), "int8": (-(2**7), 2**7), "int16": (-(2**15), 2**15),
    "int32": (-(2**31), 2**31), "int64": (-(2**63), 2**63 - 2**10),  # the last number below 2**63 that a float holds
}  # fmt: skip
_VALUES = {**_WHOLE, "float16": (-65504, 65504), "float8_e4m3fn": (-448, 448), "float8_e5m2": (-57344, 57344)}
"""What `values` of an input may be within, half-open; any float for the dtypes that are not listed."""
_FUNCTIONS = ("abs", "float", "math", "max", "min", "round", "torch")
_OP = re.compile(r"\w+::\w+(\.\w+)?")
_TARGET = re.compile(r".+:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _fail(where: str, key: str, message: str, hint: str = "") -> SpecError:
    return SpecError(f"{where}: {key}: {message}", hint)


def _check_model(spec: Spec, where: str) -> None:
    model = spec.model
    if model.target is not None and model.huggingface is not None:
        raise _fail(where, "model", "has both `target` and `huggingface`", "remove one of them")
    if not model.target and not model.huggingface:
        raise _fail(where, "model", "names no model", "add `target: FILE.py:NAME` or `huggingface: FOLDER`")
    if model.target is not None and not _TARGET.fullmatch(model.target):
        hint = "write FILE.py:NAME or package.module:NAME"
        raise _fail(where, "model.target", f"{model.target!r} names no class or function", hint)
    if model.target is not None and not spec.inputs:
        raise _fail(where, "inputs", "missing; list forward's arguments with shape and dtype")
    if spec.kv_cache is not None and not model.huggingface:
        raise _fail(
            where, "kv_cache", "is for model.huggingface only", "declare the caches as inputs with `bound: true`"
        )
    yaml_text.check_plain(model.args, "model.args", where)


def _check_name(name: str, key: str, where: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        hint = "use letters, digits and underscores" if not keyword.iskeyword(name) else "it is a word of Python"
        raise _fail(where, key, f"{name!r} cannot be a name", hint)


def _check_input(spec: Spec, name: str, entry: InputSpec, where: str) -> None:
    for part in entry.shape:
        try:
            dim, more = parse_size(part)
        except ValueError:
            hint = "write a number, a name in dims, or such a name plus a number: num_requests + 1"
            raise _fail(where, f"inputs.{name}.shape", f"{part!r} is no size", hint) from None
        if dim and dim not in spec.dims:
            hint = suggest(dim, spec.dims, "dims") if spec.dims else f"add `{dim}: {{min: 1, max: 8192}}` to dims"
            raise _fail(where, f"inputs.{name}.shape", f"dimension {dim!r} has no bounds in dims", hint)
        if dim and spec.dims[dim].min + more < 0:
            raise _fail(where, f"inputs.{name}.shape", f"{part!r} is below 0 at {dim} = {spec.dims[dim].min}")
    upper = {dim: bounds.max for dim, bounds in spec.dims.items()}
    most = math.prod(max(size_at(part, upper), 1) for part in entry.shape)
    if most > MOST_ELEMENTS:
        large = f"{shown([*entry.shape])} is up to {most} elements, expected at most {MOST_ELEMENTS}"
        raise _fail(where, f"inputs.{name}.shape", large, "lower a size, or the max of a dimension")
    if entry.pad is not None:
        _check_pad(name, entry, where)
    if entry.values is not None:
        low, high = entry.values
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            hint = "write [low, high] with low < high, both finite"
            raise _fail(where, f"inputs.{name}.values", f"[{low:g}, {high:g}] holds no values", hint)
        lowest, highest = _VALUES.get(entry.dtype, (low, high))
        if low < lowest or high > highest:
            outside = f"[{low:g}, {high:g}] has values that {entry.dtype} cannot hold"
            raise _fail(where, f"inputs.{name}.values", outside, f"stay within [{lowest}, {highest}]")
        if entry.dtype in _WHOLE and math.ceil(low) >= high:
            hint = f"write [{math.floor(low)}, {math.floor(low) + 1}] for {math.floor(low)} alone"
            raise _fail(where, f"inputs.{name}.values", f"[{low:g}, {high:g}] holds no whole number", hint)


def _check_pad(name: str, entry: InputSpec, where: str) -> None:
    if not entry.shape or any(isinstance(part, str) for part in entry.shape[1:]):
        hint = "only the first size of a padded input may be a dimension"
        raise _fail(where, f"inputs.{name}.pad", f"{shown([*entry.shape])} cannot be padded by rows", hint)
    lowest, highest = _VALUES.get(entry.dtype, (-math.inf, math.inf))
    if isinstance(entry.pad, int) and not lowest <= entry.pad <= highest:
        raise _fail(where, f"inputs.{name}.pad", f"{entry.dtype} cannot hold {entry.pad}", "")


def _size_lists(spec: Spec) -> tuple[tuple[str, tuple[int | dict[str, int], ...]], ...]:
    return (
        ("compile.sizes", spec.compile.sizes),
        ("compile.ranges", spec.compile.ranges),
        ("cudagraph.sizes", spec.cudagraph.sizes or ()),
    )


def _check_sizes(spec: Spec, where: str, key: str, values: tuple[int | dict[str, int], ...]) -> None:
    if not values or not spec.inputs:  # the config of a Hugging Face model gives inputs and dims
        return
    if not spec.dims:
        raise _fail(where, key, f"{shown(values[0])} is for no dimension: dims is empty", "name one in dims")
    try:
        named = named_values(spec, values, key)
    except SpecError as error:
        raise SpecError(f"{where}: {error.message}", error.hint) from None
    for size in named:
        for name, value in size.items():
            if name not in spec.dims:
                raise _fail(where, key, f"unknown dimension {name!r}", suggest(name, spec.dims, "dims"))
            dim = spec.dims[name]
            if not dim.min <= value <= dim.max:
                outside = f"{value} is outside the bounds of {name}, {dim.min} to {dim.max}"
                raise _fail(where, key, outside, f"change dims.{name} or remove {value}")
        if not size:
            raise _fail(where, key, "an empty mapping names no dimension", "write {dimension: value}")


def _check_passes(spec: Spec, where: str) -> None:
    yaml_text.check_plain(spec.passes, "passes", where)
    custom = spec.passes.get("custom", [])
    if not isinstance(custom, list):
        raise _fail(where, "passes.custom", f"{shown(custom)} is not a list", "write [package.module:Pass]")
    for index, entry in enumerate(custom):
        if not isinstance(entry, str) or not _TARGET.fullmatch(entry):
            hint = "write package.module:Pass"
            raise _fail(where, f"passes.custom[{index}]", f"{shown(entry)} names no pass", hint)
