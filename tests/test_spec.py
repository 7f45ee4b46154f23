"""model.yaml: what is accepted, and the exact words for what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fxc.errors import SpecError
from fxc.random_inputs import draw
from fxc.spec import Spec, load_spec, named_values, parse_spec, to_data

GOOD = """
model:
  target: ./tiny.py:Tiny
  args: {layers: 4, eps: 1e-5, names: [a, b], bias: null}
  dtype: bfloat16
device: cpu
inputs:
  x: {shape: [n, 4], dtype: float32}
  positions: {shape: [n], dtype: int64, values: [0, 8192]}
dims:
  n: {min: 1, max: 64}
compile: {sizes: [1, 8], ranges: [16]}
"""
DTYPES = (
    "float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2, int64, int32, int16, int8, uint8, bool, complex64"
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("model.yaml")


def test_good(file: Path) -> None:
    file.write_text(GOOD)
    spec = load_spec(file)
    assert spec.model.args == {"layers": 4, "eps": 1e-5, "names": ["a", "b"], "bias": None}
    assert spec.inputs["x"].shape == ("n", 4)
    assert spec.inputs["positions"].values == (0, 8192)
    assert spec.partition.splitting_ops == ("fxc::attention",)
    assert [box.label for box in spec.sizes()] == ["n=1", "n=8"]
    assert [box.label for box in spec.ranges()] == ["n=1..16", "n=17..64"]
    assert parse_spec(to_data(spec)) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec) == spec


def test_sizes_need_level_2_and_come_once(file: Path) -> None:
    file.write_text(GOOD)
    assert load_spec(file, ["compile.level=1"]).sizes() == ()
    assert [box.label for box in load_spec(file, ["compile.sizes=[8, 1, {n: 8}]"]).sizes()] == ["n=1", "n=8"]


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("compile.level=1", {"compile": {"level": 1}}),
        ("compile.sizes=[2, 4]", {"compile": {"sizes": [2, 4]}}),
        ("model.args.layers=2", {"model": {"args": {"layers": 2}}}),
        ("model.args.eps=1e-6", {"model": {"args": {"eps": 1e-6}}}),
        ("model.args.deep.er=yes", {"model": {"args": {"deep": {"er": True}}}}),
        ("model.args.name=a=b", {"model": {"args": {"name": "a=b"}}}),
        ("model.args.name='8'", {"model": {"args": {"name": "8"}}}),
        ("model.dtype=", {"model": {}}),
        ("cudagraph.mode=none", {"cudagraph": {"mode": "none"}}),
    ],
)
def test_overrides(file: Path, override: str, read: dict[str, Any]) -> None:
    file.write_text(GOOD)

    def holds(part: Any, whole: Any) -> bool:
        if isinstance(part, dict):
            return all(name in whole and holds(value, whole[name]) for name, value in part.items())
        return bool(part == whole and type(part) is type(whole))

    assert holds(read, json.loads(msgspec.json.encode(load_spec(file, [override]))))


def test_later_overrides_win(file: Path) -> None:
    file.write_text(GOOD)
    assert load_spec(file, ["compile.level=1", "compile.level=3"]).compile.level == 3


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int64", (-(2.0**63), 2.0**63 - 1024)),
        ("int32", (-(2.0**31), 2.0**31)),
        ("uint8", (0.0, 256.0)),
        ("uint8", (254.5, 255.5)),
        ("int8", (-128.0, -127.5)),
        ("bool", (1.0, 2.0)),
        ("bool", (-0.0, 0.5)),
        ("float16", (-65504.0, 65504.0)),
        ("float32", (0.5, 0.9)),
        ("float32", (0.0, 1e30)),
    ],
)
def test_values_at_the_ends_of_a_dtype(file: Path, dtype: str, values: tuple[float, float]) -> None:
    """Accepted, and what is drawn lies within them."""
    file.write_text(GOOD)
    spec = load_spec(file, [f"inputs.x={{shape: [n], dtype: {dtype}, values: {[*values]}}}"])
    assert spec.inputs["x"].values == values
    drawn = draw((1000,), getattr(torch, dtype), values, torch.Generator().manual_seed(0)).double()
    assert values[0] <= drawn.min()
    assert drawn.max() <= values[1]
    assert drawn.isfinite().all()


# One line per mistake: what is set, the key named, the message, the hint.
MISTAKES = [
    ("foo=1", "foo: unknown key",
     "known keys: model, device, inputs, dims, kv_cache, compile, partition, passes, cudagraph"),
    ("compile.levle=1", "compile.levle: unknown key", "did you mean 'level'?"),
    ("inputs.x.dtpye=int8", "inputs.x.dtpye: unknown key", "did you mean 'dtype'?"),
    ("inputs.x.dtype=float3", f"inputs.x.dtype: 'float3' is not one of {DTYPES}", "did you mean 'float32'?"),
    ("inputs.x.dtype=bf16", f"inputs.x.dtype: 'bf16' is not one of {DTYPES}", "did you mean 'bfloat16'?"),
    ("inputs.x.dtype=qqq", f"inputs.x.dtype: 'qqq' is not one of {DTYPES}", ""),
    ("inputs.x.dtype=null", f"inputs.x.dtype: has no value, expected one of {DTYPES}", "give it one or remove the key"),
    ("inputs.x.shape=n", "inputs.x.shape: 'n' is text, expected a list", "write [n]"),
    ("inputs.x.shape=[m]", "inputs.x.shape: dimension 'm' has no bounds in dims", "dims: n"),
    ("inputs.x.shape=[1.5]", "inputs.x.shape[0]: 1.5 is a number, expected a whole number or text", ""),
    ("inputs.x.shape=[true]", "inputs.x.shape[0]: true is a boolean, expected a whole number or text", ""),
    ("inputs.x.shape=[n, null]", "inputs.x.shape[1]: has no value, expected a whole number or text",
     "give it one or remove the key"),
    ("inputs.x.shape=[-1]", "inputs.x.shape[0]: -1 is too small, expected 0 or more", ""),
    ("inputs.x=[n]", "inputs.x: ['n'] is a list, expected a mapping with the keys shape, dtype, values, pad, bound", ""),
    ("inputs.x={shape: [n]}", f"inputs.x.dtype: missing; expected one of {DTYPES}", ""),
    ("inputs.x.values=[1]", "inputs.x.values: [1] has 1 entries, expected 2", ""),
    ("inputs.x.values=[2, 1]", "inputs.x.values: [2, 1] holds no values",
     "write [low, high] with low < high, both finite"),
    ("inputs.x.values=[0, .inf]", "inputs.x.values: [0, inf] holds no values",
     "write [low, high] with low < high, both finite"),
    ("inputs.x={shape: [n], dtype: int64, values: [0, 1e30]}",
     "inputs.x.values: [0, 1e+30] has values that int64 cannot hold",
     "stay within [-9223372036854775808, 9223372036854774784]"),
    ("inputs.x={shape: [n], dtype: uint8, values: [0, 1000]}",
     "inputs.x.values: [0, 1000] has values that uint8 cannot hold", "stay within [0, 256]"),
    ("inputs.x={shape: [n], dtype: int8, values: [-129, 1]}",
     "inputs.x.values: [-129, 1] has values that int8 cannot hold", "stay within [-128, 128]"),
    ("inputs.x={shape: [n], dtype: bool, values: [0, 3]}",
     "inputs.x.values: [0, 3] has values that bool cannot hold", "stay within [0, 2]"),
    ("inputs.x={shape: [n], dtype: float16, values: [0, 1e6]}",
     "inputs.x.values: [0, 1e+06] has values that float16 cannot hold", "stay within [-65504, 65504]"),
    ("inputs.x={shape: [n], dtype: int32, values: [0.5, 0.9]}",
     "inputs.x.values: [0.5, 0.9] holds no whole number", "write [0, 1] for 0 alone"),
    ("inputs.x.values=[0, a]", "inputs.x.values[1]: 'a' is text, expected a number", ""),
    ("inputs.1x={shape: [n], dtype: bool}", "inputs.1x: '1x' cannot be a name", "use letters, digits and underscores"),
    ("inputs.class={shape: [n], dtype: bool}", "inputs.class: 'class' cannot be a name", "it is a word of Python"),
    ("inputs={}", "inputs: missing; list forward's arguments with shape and dtype", ""),
    ("dims=[]", "dims: [] is a list, expected a mapping", ""),
    ("dims.n=5", "dims.n: 5 is a whole number, expected a mapping with the keys min, max", ""),
    ("dims.n={min: 1}", "dims.n.max: missing; expected a whole number", ""),
    ("dims.n.max=0", "dims.n.max: 0 is too small, expected 1 or more", ""),
    ("dims.n.max='64'", "dims.n.max: '64' is text, expected a whole number", "remove the quotes"),
    ("dims.n.max=99999999999999999999",
     "dims.n.max: 99999999999999999999 is too large, expected at most 2147483647", ""),
    ("inputs.x.shape=[4611686018427387904]",
     "inputs.x.shape: [4611686018427387904] is up to 4611686018427387904 elements, expected at most 35184372088832",
     "lower a size, or the max of a dimension"),
    ("inputs.x.shape=[0, n, 549755813889]",
     "inputs.x.shape: [0, 'n', 549755813889] is up to 35184372088896 elements, expected at most 35184372088832",
     "lower a size, or the max of a dimension"),
    ("dims.n={min: 5, max: 2}", "dims.n: min 5 is above max 2", ""),
    ("dims.k={min: 1, max: 2}", "dims.k: no input has this dimension", "use it in a shape or remove it"),
    ("device=gpu", "device: 'gpu' is not one of cpu, cuda", "did you mean 'cuda'?"),
    ("device=3", "device: 3 is not one of cpu, cuda", ""),
    ("model.target=tiny.py", "model.target: 'tiny.py' names no class or function",
     "write FILE.py:NAME or package.module:NAME"),
    ("model.target=5", "model.target: 5 is a whole number, expected text", "quote it"),
    ("model.target=", "model: names no model", "add `target: FILE.py:NAME` or `huggingface: FOLDER`"),
    ("model.huggingface=./x", "model: has both `target` and `huggingface`", "remove one of them"),
    ("model=x.py:X", "model: 'x.py:X' is text, expected a mapping with the keys target, args, huggingface, dtype", ""),
    ("model.args=[1]", "model.args: [1] is a list, expected a mapping", ""),
    ("model.args={1: 2}", "model.args.1: the key 1 is a whole number, expected text", "quote it"),
    ("model.args.a={1: 2}", "model.args.a: the key 1 is not text", "quote it"),
    ("model.args.when=2020-01-01", "model.args.when: 2020-01-01 is a date, expected plain data", "quote it"),
    ("model.args.x=[.nan]", "model.args.x[0]: nan is not a finite number", "pass it as text"),
    ("model.args.x=99999999999999999999", "model.args.x: 99999999999999999999 does not fit 64 bits", "quote it"),
    ("compile.level=7", "compile.level: 7 is not one of 0, 1, 2, 3", ""),
    ("compile.level='2'", "compile.level: '2' is not one of 0, 1, 2, 3", "remove the quotes"),
    ("compile.level=true", "compile.level: true is not one of 0, 1, 2, 3", ""),
    ("compile.sizes=8", "compile.sizes: 8 is a whole number, expected a list", "write [8]"),
    ("compile.sizes=['8']", "compile.sizes[0]: '8' is text, expected a whole number or a mapping", ""),
    ("compile.sizes=[0]", "compile.sizes[0]: 0 is too small, expected 1 or more", ""),
    ("compile.sizes=[{n: 0}]", "compile.sizes[0].n: 0 is too small, expected 1 or more", ""),
    ("compile.sizes=[1, 65]", "compile.sizes: 65 is outside the bounds of n, 1 to 64", "change dims.n or remove 65"),
    ("compile.sizes=[{m: 3}]", "compile.sizes: unknown dimension 'm'", "dims: n"),
    ("compile.ranges=[100]", "compile.ranges: 100 is outside the bounds of n, 1 to 64", "change dims.n or remove 100"),
    ("cudagraph.sizes=[65]", "cudagraph.sizes: 65 is outside the bounds of n, 1 to 64", "change dims.n or remove 65"),
    ("cudagraph.mode=ful", "cudagraph.mode: 'ful' is not one of none, piecewise, full, full_and_piecewise",
     "did you mean 'full'?"),
    ("partition.splitting_ops=fxc::attention", "partition.splitting_ops: 'fxc::attention' is text, expected a list",
     "write [fxc::attention]"),
    ("partition.splitting_ops=[attention]",
     "partition.splitting_ops: 'attention' is not the qualified name of an op",
     "write namespace::op, for example fxc::attention"),
    ("passes=null", "passes: has no value, expected a mapping", "give it one or remove the key"),
    ("passes.custom=a:B", "passes.custom: 'a:B' is not a list", "write [package.module:Pass]"),
    ("passes.custom=[a]", "passes.custom[0]: 'a' names no pass", "write package.module:Pass"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "message", "hint"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_mistakes(file: Path, override: str, message: str, hint: str) -> None:
    file.write_text(GOOD)
    assert failure(file, override) == (f"model.yaml: {message}", hint)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device", "--set device: expected KEY=VALUE"),
        ("=3", "--set =3: expected KEY=VALUE"),
        ("a..b=3", "--set a..b=3: expected KEY=VALUE"),
        ("device.x=1", "--set device.x=1: device is 'cpu', not a mapping"),
        ("compile.sizes.0=1", "--set compile.sizes.0=1: compile.sizes is [1, 8], not a mapping"),
        ("a=[1", "--set a=[1: line 1, column 3: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_overrides_that_cannot_be_read(file: Path, override: str, message: str) -> None:
    file.write_text(GOOD)
    assert failure(file, override)[0] == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model.yaml is empty, expected a mapping with the keys model and device"),
        ("# nothing\n", "model.yaml is empty, expected a mapping with the keys model and device"),
        ("- a", "model.yaml: ['a'] is not a mapping; expected one with the keys model and device"),
        ("a: [", "model.yaml: line 1, column 5: expected the node content, but found '<stream end>'"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "model.yaml: line 4, column 3: the key 'c' stands there twice"),
        ("a: 1\n---\nb: 2", "model.yaml: line 2, column 1: but found another document"),
        ("a: !!python/name:os.system", None),
        ("1: 2", "model.yaml: 1: the key 1 is a whole number, expected text"),
        ("on: 2", "model.yaml: true: the key true is a boolean, expected text"),
        ("device: cpu", "model.yaml: model: missing; expected a mapping"),
        ("model: {target: a:b, args: &x {y: *x}}\ndevice: cpu\ninputs: {x: {shape: [], dtype: bool}}",
         "model.yaml: model: nested too deeply, expected at most 32 levels"),
        ("[" * 1000, "model.yaml: nested too deeply"),
        ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)),
         "model.yaml: 1234567909 values, aliases counted at each use, expected at most 100000"),
        ('a: "\\ud800"', "model.yaml: '\\ud800' is not text: half of a surrogate pair"),
        ("a: 2020-99-99", "model.yaml: not YAML: month must be in 1..12"),
    ],
)  # fmt: skip
def test_texts(file: Path, text: str, message: str | None) -> None:
    file.write_text(text)
    found, _ = failure(file)
    assert found == message if message else found.startswith("model.yaml: line 1, column 4: could not determine")


def test_merge_keys_are_no_duplicates(file: Path) -> None:
    file.write_text(GOOD + "passes: {a: &a {b: 1}, c: {<<: *a, b: 2}, d: {<<: *a}}\n")
    assert load_spec(file).passes == {"a": {"b": 1}, "c": {"b": 2}, "d": {"b": 1}}


def test_files_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    assert failure(file)[0] == "model.yaml does not exist"
    file.mkdir()
    assert failure(file)[0] == "model.yaml is a directory, expected a YAML file"
    other = Path("other.yaml")
    other.write_bytes(b"\xff\xfe")
    assert failure(other)[0] == "other.yaml is not UTF-8 text: invalid start byte at byte 0"


@pytest.mark.parametrize(
    ("sizes", "message", "hint"),
    [
        ([8], "spec: compile.sizes: 8 does not say which dimension; there are 2", "write a mapping, {b: 8, t: 8}"),
        ([{}], "spec: compile.sizes: an empty mapping names no dimension", "write {dimension: value}"),
        ([{"b": 1, "tt": 2}], "spec: compile.sizes: unknown dimension 'tt'", "did you mean 't'?"),
    ],
)
def test_sizes_of_two_dimensions(sizes: list[Any], message: str, hint: str) -> None:
    data = {
        "model": {"target": "a:B"},
        "device": "cpu",
        "inputs": {"x": {"shape": ["b", "t"], "dtype": "bool"}},
        "dims": {"b": {"min": 1, "max": 4}, "t": {"min": 1, "max": 9}},
    }
    good = parse_spec({**data, "compile": {"sizes": [{"t": 2, "b": 1}], "ranges": [{"t": 4}]}})
    assert [box.label for box in good.sizes()] == ["b=1,t=2"]
    assert [box.label for box in good.ranges()] == ["b=1..4,t=1..4", "b=1..4,t=5..9"]
    part = parse_spec({**data, "compile": {"sizes": [{"b": 2}, {"t": 5}], "ranges": [{"t": 4}]}})
    assert [box.label for box in part.sizes()] == ["b=1..4,t=5", "b=2,t=1..4", "b=2,t=5..9"]
    assert named_values(good, good.compile.sizes, "compile.sizes") == [{"t": 2, "b": 1}]
    with pytest.raises(SpecError) as caught:
        parse_spec({**data, "compile": {"sizes": sizes}})
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_sizes_without_dimensions() -> None:
    data = {"model": {"target": "a:B"}, "device": "cpu", "inputs": {"x": {"shape": [3], "dtype": "bool"}}}
    assert [box.label for box in parse_spec(data).ranges()] == ["static"]
    with pytest.raises(SpecError, match=r"compile\.sizes: 8 is for no dimension: dims is empty"):
        parse_spec({**data, "compile": {"sizes": [8]}})


def test_huggingface_needs_no_inputs() -> None:
    spec = parse_spec({"model": {"huggingface": "./m"}, "device": "cuda", "compile": {"sizes": [1, 8]}})
    assert spec.inputs == {}


def test_schema_accepts_what_the_contract_shows() -> None:
    from fxc.spec import json_schema

    schema = json_schema()
    assert json.dumps(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["$defs"]["Spec"]["properties"]) == {
        "model", "device", "inputs", "dims", "kv_cache", "compile", "partition", "passes", "cudagraph",
    }  # fmt: skip


def failure(file: Path, *overrides: str) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        load_spec(file, overrides)
    return caught.value.message, caught.value.hint


def test_shapes_with_a_number_added() -> None:
    data: dict[str, Any] = {
        "model": {"target": "a:B"},
        "device": "cpu",
        "inputs": {"starts": {"shape": ["n+1"], "dtype": "int32"}, "x": {"shape": ["n"], "dtype": "int32"}},
        "dims": {"n": {"min": 0, "max": 4}},
    }
    assert parse_spec(data).inputs["starts"].shape == ("n+1",)
    for shape, message, hint in (
        (["n*2"], "spec: inputs.starts.shape: 'n*2' is no size", "write a number, a name in dims, or such a name plus"),
        (["n - 1"], "spec: inputs.starts.shape: 'n - 1' is below 0 at n = 0", ""),
        (["m + 1"], "spec: inputs.starts.shape: dimension 'm' has no bounds in dims", "dims: n"),
    ):
        wrong = {**data, "inputs": {**data["inputs"], "starts": {"shape": shape, "dtype": "int32"}}}
        with pytest.raises(SpecError) as caught:
            parse_spec(wrong)
        assert caught.value.message == message
        assert caught.value.hint.startswith(hint)
    alone = {**data, "inputs": {"starts": data["inputs"]["starts"]}}
    with pytest.raises(SpecError, match=r"dims\.n: no input has it as a size by itself"):
        parse_spec(alone)


def test_kv_cache_is_for_hugging_face_models() -> None:
    data = {"model": {"target": "a:B"}, "device": "cpu", "inputs": {"x": {"shape": [1], "dtype": "bool"}}}
    with pytest.raises(SpecError, match="kv_cache: is for model.huggingface only"):
        parse_spec({**data, "kv_cache": {"block_size": 16}})
    spec = parse_spec({"model": {"huggingface": "."}, "device": "cpu", "kv_cache": {}, "compile": {"sizes": [8]}})
    assert named_values(spec, spec.compile.sizes, "compile.sizes") == [
        {"num_tokens": 8, "num_requests": 8}, {"num_tokens": 8},
    ]  # fmt: skip
