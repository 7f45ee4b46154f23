"""What the keys of a build are made of, and the digests that the direct lookup compares."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fxc import identity, lower, machine, plan
from fxc.cache import Cache, key
from fxc.manifest import Source
from fxc.ranks import Ranks
from fxc.spec import CudagraphSpec, Spec, parse_spec
from fxc.target import LEVELS, Target
from tests.building import plan_of
from tests.building import target as here
from tests.cache.conftest import make_manifest
from tests.zoo import calls

SPEC: dict[str, Any] = {
    "model": {"target": "./two.py:Two", "args": {"width": 16, "op": "relu"}, "dtype": "float32"},
    "device": "cpu",
    "inputs": {"x": {"shape": ["n", "m"], "dtype": "float32"}, "y": {"shape": ["n", "m"], "dtype": "float32"}},
    "dims": {"n": {"min": 1, "max": 64}, "m": {"min": 1, "max": 64}},
    "compile": {"sizes": [{"n": 1, "m": 8}], "ranges": [{"n": 8}], "level": 2},
    "partition": {"splitting_ops": ["fxc::attention"]},
}
OTHER: dict[str, Any] = {
    "device": "cuda", "arch": "sparc", "cpu_features": ("avx2",), "torch": "2.99.0", "triton": "9.9", "cuda": "99.0",
    "compute_capability": (9, 9), "properties": {"multi_processor_count": 1}, "compiler": "g++ 99.1.0",
}  # fmt: skip
"""For each field of a target, what no machine has."""
HUGGINGFACE = parse_spec({"model": {"huggingface": "./folder"}, "device": "cpu"})


def test_every_field_of_a_target_is_flipped() -> None:
    assert set(OTHER) == set(Target.__struct_fields__)


def changed(path: str, value: Any) -> Spec:
    """SPEC with another value at a dotted path."""
    data = msgspec.json.decode(msgspec.json.encode(SPEC))
    node = data
    *parents, last = path.split(".")
    for name in parents:
        node = node[name]
    node[last] = value
    return parse_spec(data)


def backwards(path: str) -> Spec:
    """SPEC with the keys of a mapping the other way round."""
    value = SPEC
    for name in path.split("."):
        value = value[name]
    return changed(path, dict(reversed(value.items())))


def direct(spec: Spec | None = None, target: Target | None = None, place: Ranks | None = None) -> str:
    return identity.direct_key(spec or parse_spec(SPEC), target or here(), place or Ranks())


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(backwards("inputs"), id="order of inputs"),
        pytest.param(backwards("dims"), id="order of dims"),
        pytest.param(changed("inputs.x.dtype", "float64"), id="dtype of an input"),
        pytest.param(changed("inputs.x.shape", ["n", 8]), id="shape of an input"),
        pytest.param(changed("inputs.x.values", [0, 5]), id="values of an input"),
        pytest.param(changed("dims.n.max", 65), id="bounds"),
        pytest.param(changed("model.target", "./two.py:Three"), id="target"),
        pytest.param(changed("model.args.width", 8), id="args"),
        pytest.param(changed("model.dtype", "bfloat16"), id="dtype of the model"),
        pytest.param(changed("compile.sizes", [{"n": 2, "m": 8}]), id="sizes"),
        pytest.param(changed("compile.ranges", [{"n": 9}]), id="ranges"),
        pytest.param(changed("compile.level", 3), id="level"),
        pytest.param(changed("partition.splitting_ops", ["aten::mm"]), id="splitting ops"),
        pytest.param(changed("passes", {"noop": {}}), id="passes"),
        pytest.param(changed("device", "cuda"), id="device"),
    ],
)
def test_of_the_spec_in_the_direct_key(spec: Spec) -> None:
    assert direct(spec) != direct()


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(backwards("model.args"), id="order of args"),
        pytest.param(backwards("inputs.x"), id="order inside an input"),
        pytest.param(changed("cudagraph", {"mode": "none", "sizes": [{"n": 1, "m": 8}]}), id="cudagraph"),
    ],
)
def test_of_the_spec_not_in_the_direct_key(spec: Spec) -> None:
    assert direct(spec) == direct()


@pytest.mark.parametrize("field", sorted(OTHER))
def test_the_target_in_the_direct_key(field: str) -> None:
    other = msgspec.structs.replace(here(), **{field: OTHER[field]})
    assert (direct(target=other) == direct()) == (field == "compiler"), "the compiler is among the sources"


@pytest.mark.parametrize("place", [Ranks(1, 2), Ranks(0, 2), Ranks(0, 1, 1)])
def test_ranks_are_in_the_direct_key(place: Ranks) -> None:
    assert direct(place=place) != direct()


def test_fxc_itself_is_in_the_direct_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = direct()
    with monkeypatch.context() as patched:
        patched.setattr(identity, "own_code", lambda: "another")
        assert direct() != before
    with monkeypatch.context() as patched:
        patched.setattr(identity, "fxc_version", lambda: "99")
        assert direct() != before
    assert direct() == before


def test_digest_of_fxc_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages but the command line's; the same where they are installed in one folder."""

    def digest_with(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / "site" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(text)
        importlib.invalidate_caches()
        return identity.own_code.__wrapped__()

    class Spec:
        def __init__(self, name: str) -> None:
            self.submodule_search_locations = [str(tmp_path / "site" / name.replace(".", "/"))]

    installed = identity.own_code.__wrapped__()
    assert identity.own_code() == installed
    monkeypatch.setattr(importlib.util, "find_spec", Spec)
    first = digest_with(fxc__plan="x", fxc__models__reads="x", fxc__cache__key="x", fxc__passes__a="x", fxc__cli__a="x")
    assert digest_with(fxc__cli__a="y") == first
    seen = {first, installed}
    for name in ("fxc__plan", "fxc__models__reads", "fxc__cache__key", "fxc__passes__a", "fxc__new"):
        seen.add(digest_with(**{name: "y"}))
    assert len(seen) == 7


def test_versions_in_the_direct_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers where it makes the model; Python's minor version."""
    plain, folder = direct(), direct(HUGGINGFACE)
    with monkeypatch.context() as patched:
        installed = identity._installed
        patched.setattr(identity, "_installed", lambda name: "9.9" if name == "transformers" else installed(name))
        assert (direct() == plain, direct(HUGGINGFACE) == folder) == (True, False)
    major, minor, micro, *rest = sys.version_info
    for version, same in [((major, minor, micro + 1), True), ((major, minor + 1, micro), False)]:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "version_info", (*version, *rest))
            assert (direct() == plain) == same


def elsewhere(patched: pytest.MonkeyPatch, place: Path) -> None:
    """Another user, folder and environment."""
    patched.chdir(place)
    for name in ("HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "LANG", "PYTHONHASHSEED", "OMP_NUM_THREADS"):
        patched.setenv(name, str(place))


def test_surroundings_are_in_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct_before, content = direct(target=machine.probe("cpu")), plan_of(calls.ActInside, level=2, sizes=[4]).manifest
    elsewhere(monkeypatch, tmp_path)
    assert direct(target=machine.probe("cpu")) == direct_before
    again = plan_of(calls.ActInside, level=2, sizes=[4]).manifest
    assert (again.hash, again.programs) == (content.hash, content.programs)


def test_folder_ranks_and_cudagraph_are_not_in_the_content_key(tmp_path: Path) -> None:
    """Ranks are no argument of what makes it."""
    text = (
        "import torch\n\nclass Two(torch.nn.Module):\n    def __init__(self, width, op):\n        super().__init__()\n"
        "        self.op = getattr(torch, op)\n\n    def forward(self, x, y):\n        return self.op(x) - y\n"
    )
    hashes = {}
    for name, spec in {
        "one": parse_spec(SPEC),
        "another place": msgspec.structs.replace(parse_spec(SPEC), cudagraph=CudagraphSpec(mode="none")),
        "swapped": backwards("inputs"),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "two.py").write_text(text)
        hashes[name] = plan.make_plan(spec, tmp_path / name, here()).manifest.hash
    assert hashes["one"] == hashes["another place"] != hashes["swapped"]


Arguments = dict[str, Any]
NAMES = ("spec", "target", "code", "unique", "programs", "constants", "bound", "passes", "units")


@pytest.fixture(scope="module")
def factors() -> Arguments:
    """What the content key of a model with a custom op inside a piece is made of."""
    caught: Arguments = {}
    plain = plan._factors

    def catch(*arguments: Any) -> Any:
        caught.update(zip(NAMES, arguments, strict=True))
        return plain(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan, "_factors", catch)
        plan_of(calls.ActInside, level=2, sizes=[4])
    return caught


def content(arguments: Arguments) -> str:
    return identity.content_key(plan._factors(*(arguments[name] for name in NAMES)))


def with_spec(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, "spec": msgspec.structs.replace(arguments["spec"], **changes)}


def with_target(field: str) -> Callable[[Arguments], Arguments]:
    change = {field: OTHER[field]}
    return lambda arguments: {**arguments, "target": msgspec.structs.replace(arguments["target"], **change)}


def with_pieces(**changes: Any) -> Callable[[Arguments], Arguments]:
    def flip(arguments: Arguments) -> Arguments:
        calls = {
            digest: dataclasses.replace(call, piece=dataclasses.replace(call.piece, **changes))
            for digest, call in arguments["unique"].items()
        }
        return {**arguments, "unique": calls}

    return flip


def swapped(name: str) -> Callable[[Arguments], Arguments]:
    """Two entries, in the one order or the other."""

    def flip(arguments: Arguments) -> Arguments:
        (entry,) = getattr(arguments["spec"], name).values()
        return with_spec(**{name: {"zz": entry, "aa": entry}})(arguments)

    return flip


IN_CONTENT: dict[str, Callable[[Arguments], Arguments]] = {
    "the program": lambda arguments: {**arguments, "code": arguments["code"] + "\nx = 1\n"},
    "a piece": with_pieces(text="def piece(): pass\n"),
    "schema of a custom op": with_pieces(custom_ops=("zoo::act(Tensor x, int n) -> Tensor",)),
    "programs": lambda arguments: {**arguments, "programs": arguments["programs"][1:]},
    "constants": lambda arguments: {**arguments, "constants": b"1"},
    "weights": lambda arguments: {**arguments, "bound": b"1"},
    "inputs": lambda arguments: with_spec(
        inputs={n: msgspec.structs.replace(i, values=(0, 7)) for n, i in arguments["spec"].inputs.items()}
    )(arguments),
    "dims": lambda arguments: with_spec(
        dims={n: msgspec.structs.replace(d, max=d.max + 1) for n, d in arguments["spec"].dims.items()}
    )(arguments),
    "level": lambda arguments: with_spec(compile=msgspec.structs.replace(arguments["spec"].compile, level=3))(
        arguments
    ),
    "passes": lambda arguments: {**arguments, "passes": "noop:another"},
    "tuning": lambda arguments: {
        **arguments,
        "units": [dataclasses.replace(unit, tuning="{}") for unit in arguments["units"]],
    },
    **{field: with_target(field) for field in OTHER},
}
NOT_IN_CONTENT: dict[str, Callable[[Arguments], Arguments]] = {
    "nothing": lambda arguments: arguments,
    "title": lambda arguments: {**arguments, "code": arguments["code"].replace("traced by", "made by", 1)},
    "cudagraph": with_spec(cudagraph=CudagraphSpec(mode="none")),
    "values in a piece": with_pieces(values=((0.0, 5.0),)),
}


@pytest.mark.parametrize("name", sorted(IN_CONTENT))
def test_what_is_in_the_content_key(factors: Arguments, name: str) -> None:
    assert content(IN_CONTENT[name](factors)) != content(factors)


@pytest.mark.parametrize("name", sorted(NOT_IN_CONTENT))
def test_what_is_not_in_the_content_key(factors: Arguments, name: str) -> None:
    assert content(NOT_IN_CONTENT[name](factors)) == content(factors)


@pytest.mark.parametrize("name", ["inputs", "dims"])
def test_order_is_in_the_content_key(factors: Arguments, name: str) -> None:
    one = swapped(name)(factors)
    other = with_spec(**{name: dict(reversed(getattr(one["spec"], name).items()))})(one)
    assert content(one) != content(other)


def test_versions_are_in_the_content_key(factors: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(factors)
    others = [(lower, "VERSION", "next"), (plan, "FORMAT", 99), (identity, "fxc_version", lambda: "9")]
    for module, name, value in others:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            assert content(factors) != before, name


def test_sources_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALE", raising=False)
    (absent,) = identity.sources([Path("<string>")], ["SCALE"], tmp_path, 0)
    assert (absent.file, identity.digest_of(absent, tmp_path)) == ("env:SCALE", absent.digest)
    monkeypatch.setenv("SCALE", "")
    assert identity.digest_of(absent, tmp_path) != absent.digest


@pytest.mark.parametrize("layout", ["space_ns/inner/code.py", "space_ns/code.py", "plain_pkg/inner/code.py"])
def test_a_module_of_a_namespace_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Without __init__.py, at the top or below; an upgrade is noticed, and another place is not."""
    path = tmp_path / "site-packages" / layout
    path.parent.mkdir(parents=True)
    path.write_text("X = 1\n")
    name = layout.removesuffix(".py").replace("/", ".")
    top = name.partition(".")[0]
    if top == "plain_pkg":
        (tmp_path / "site-packages" / top / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    importlib.import_module(name)
    try:
        (source,) = identity.sources([path], [], tmp_path / "project", time.time_ns())
        assert source == Source(file=f"module:{name}", digest=key.digest("X = 1\n"))
    finally:
        for module in [module for module in sys.modules if module.partition(".")[0] == top]:
            monkeypatch.delitem(sys.modules, module)
    assert identity.digest_of(source, tmp_path) == source.digest
    path.write_text("X = 2\n")
    assert identity.digest_of(source, tmp_path) == key.digest("X = 2\n")


def test_a_module_that_lies_elsewhere_than_its_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "site-packages" / "odd" / "place.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    module = type(sys)("fxc_test_no_such.place")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (source,) = identity.sources([file], [], tmp_path, time.time_ns())
    assert source == Source(file="site-packages/odd/place.py", digest=key.digest(""))


def test_a_file_that_torch_names_within_itself(tmp_path: Path) -> None:
    """As it does in the stack traces of what it inserts itself; what is found nowhere is known to be unknown."""
    names = [Path("torch/fx/passes/runtime_assert.py"), Path("torch/no_such.py")]
    found, lost = identity.sources(names, [], tmp_path, time.time_ns())
    assert (found.file, bool(found.digest)) == ("module:torch.fx.passes.runtime_assert", True)
    assert (lost.file, lost.digest) == ("module:torch.no_such", "")


def test_what_cannot_be_read_or_was_written_since_is_not_remembered(tmp_path: Path) -> None:
    """It stays among the sources, with a digest that no file has."""
    file = tmp_path / "model.py"
    file.write_text("X = 1\n")
    os.utime(file, (1, 1))  # what it was given says nothing
    after, before = time.time_ns() + 1, time.time_ns() - 10**10
    cache = Cache.open(tmp_path / "cache")
    for path, began, digest in [
        (file, after, key.digest("X = 1\n")),
        (file, before, ""),
        (tmp_path / "gone.py", after, ""),
    ]:
        records = identity.sources([path], [], tmp_path, began)
        assert records == (Source(file=path.name, digest=digest),)
        manifest = msgspec.structs.replace(make_manifest(), sources=records)
        identity.remember(cache, key.digest(str((path, began))), manifest)
        assert (cache.layout.index / f"{key.digest(str((path, began)))}.json").exists() == bool(digest)


def test_another_compiler_is_another_build_and_none_is_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Source(file="compiler:", digest=key.digest("g++ 12.2.0"))
    for version, same in [("g++ 12.2.0", True), ("g++ 13.1.0", False), ("", True)]:
        monkeypatch.setattr(machine, "compiler_version", lambda version=version: version)
        assert (identity.digest_of(built, tmp_path) == built.digest) == same


def test_only_a_build_asks_for_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache.open(tmp_path / "cache")
    spec = parse_spec(SPEC)
    manifest = msgspec.structs.replace(make_manifest(), target=machine.probe("cpu"))
    cache.publish(manifest, "rank_0_0", {}, [])
    identity.remember(cache, direct(spec, machine.probe("cpu")), manifest)
    find = identity.find
    assert find(spec, tmp_path, Ranks(), cache, compiler=True) == find(spec, tmp_path, Ranks(), cache) == manifest.hash
    monkeypatch.setattr(machine, "compiler_version", lambda: "g++ 99.1.0")
    assert find(spec, tmp_path, Ranks(), cache, compiler=True) is None
    monkeypatch.setattr(machine, "compiler_version", lambda: pytest.fail("asked"))
    assert find(spec, tmp_path, Ranks(), cache) == manifest.hash


def test_a_loader_takes_any_compiler_and_tuning_of_an_older_build_too(tmp_path: Path) -> None:
    """Each source is compared as it was for that build; a file is read once."""
    cache, spec, target = Cache.open(tmp_path / "cache"), parse_spec(SPEC), machine.probe("cpu")
    source, text = tmp_path / "two.py", "the text of the older build"
    source.write_text(text)
    same = Source(file="two.py", digest=identity.digest_of(Source(file="two.py", digest=""), tmp_path) or "")
    old = msgspec.structs.replace(make_manifest(), target=target, sources=(same,))
    changed = Source(file="two.py", digest=key.digest("later"))
    new = msgspec.structs.replace(
        make_manifest(key.digest("new")), target=msgspec.structs.replace(target, compiler="g++ 99.1.0"),
        sources=(changed,), tuning=key.digest("a record"),
    )  # fmt: skip
    for manifest in (old, new):
        cache.publish(manifest, "rank_0_0", {}, [])
        identity.remember(cache, direct(spec, target), manifest)
    assert identity.find(spec, tmp_path, Ranks(), cache) == old.hash


def test_a_loader_finds_host_code_for_any_level_that_the_cpu_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual one first, then the highest; a build only what it is for."""
    monkeypatch.setattr(machine, "_gpu", lambda index: ((9, 0), {"name": "H200"}))
    monkeypatch.setattr(machine, "_arch", lambda: "x86_64")
    monkeypatch.setattr(machine, "_features", lambda: LEVELS["x86-64-v4"])
    cache, spec = Cache.open(tmp_path / "cache"), parse_spec({**SPEC, "device": "cuda"})

    def find(target: Target | None = None) -> str | None:
        return identity.find(spec, tmp_path, Ranks(), cache, target=target)

    usual = machine.probe("cuda", compiler=False)
    assert [target.march for target in machine.served("cuda")] == ["x86-64-v3", "x86-64-v4", "x86-64-v2"]
    for march in ("x86-64-v2", "x86-64-v4", "x86-64-v3"):
        assert find(usual) is None
        target = machine.with_march(usual, march)
        manifest = msgspec.structs.replace(make_manifest(key.digest(march)), target=target)
        cache.publish(manifest, "rank_0_0", {}, [])
        identity.remember(cache, direct(spec, target), manifest)
        assert find() == find(target) == manifest.hash
    monkeypatch.setattr(machine, "_features", lambda: LEVELS["x86-64-v2"])
    assert [target.march for target in machine.served("cuda")] == ["x86-64-v3", "x86-64-v2"]
    assert [target.march for target in machine.served("cpu")] == [""]
