"""Tuning records: what is in the file, which of it a build takes, and what that changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fxc import identity, inductor_options, tuning
from fxc.cache import Cache
from fxc.errors import DamagedError, UsageError
from fxc.manifest import Source
from fxc.plan import make_plan
from fxc.spec import parse_spec
from fxc.target import Target
from fxc.tuning import Entry, Tuning
from tests.building import HERE, plan_of, spec_of
from tests.building import target as here
from tests.cache.conftest import make_manifest
from tests.test_lower import made
from tests.test_rewrite import MODEL
from tests.zoo import calls

H200 = Target(
    "cuda", "x86_64", (), "2.11.0+cu130", compute_capability=(9, 0), properties={"name": "NVIDIA H200", "warp_size": 32}
)
RULES = {"XBLOCK": 1024, "num_warps": 4, "num_stages": 1}
FAST = {"XBLOCK": 256, "num_warps": 2, "num_stages": 1}


def entry(*units: str, **changes: Any) -> Entry:
    plain = Entry("triton_poi_fused_relu_0", configuration=FAST, us=2.5, rules=RULES, rules_us=3.25, units=units)
    return msgspec.structs.replace(plain, **changes)


def record(**kernels: Entry) -> Tuning:
    return msgspec.structs.replace(tuning.empty(H200), kernels=kernels)


def test_round_trip() -> None:
    one = record(aa=entry("u1", "u2"), bb=entry(rules_us=None))
    data = tuning.encode(one)
    assert tuning.decode(data, "x") == one
    assert tuning.encode(tuning.decode(data, "x")) == data
    assert msgspec.json.decode(data)["kernels"]["aa"] == {
        "name": "triton_poi_fused_relu_0", "configuration": FAST, "us": 2.5, "rules": RULES, "rules_us": 3.25,
        "units": ["u1", "u2"],
    }  # fmt: skip
    assert tuning.file_name(H200) == "nvidia-h200-sm_90-torch-2.11.json"


def test_the_order_in_which_kernels_were_timed_is_not_in_the_digest() -> None:
    one, other = record(aa=entry("u"), bb=entry("v")), record(bb=entry("v"), aa=entry("u"))
    assert (one.digest, tuning.encode(one)) == (other.digest, tuning.encode(other))
    assert one.digest != record(aa=entry("u")).digest


def test_only_what_builds_take_is_in_the_digest() -> None:
    """The same outcome of another run misses nothing."""
    one = record(aa=entry("u", "v"))
    again = entry("v", "u", name="triton_poi_fused_relu_7", us=2.4, rules={**RULES, "num_warps": 8}, rules_us=None)
    assert record(aa=again, bb=entry()).digest == one.digest
    others = [
        record(bb=entry("u", "v")), record(aa=entry("u")), record(aa=entry("u", "v", configuration=RULES)), record(),
    ]  # fmt: skip
    assert len({one.digest, *(other.digest for other in others)}) == 5
    assert (record().digest, record(aa=entry()).digest) == ("", "")


def test_merge() -> None:
    """The later time counts, and a kernel keeps the other units that it was found in before."""
    old, new = record(aa=entry("u1", "u3"), bb=entry("u1")), record(aa=entry("u2", us=2.0), cc=entry("u2"))
    found = old.merged(new)
    assert found.kernels == {"aa": entry("u1", "u2", "u3", us=2.0), "bb": entry("u1"), "cc": entry("u2")}
    assert old.merged(tuning.empty(H200)) == old


def test_what_is_no_longer_found_in_a_unit_goes() -> None:
    """As when a release of torch writes other kernels for it."""
    old = record(aa=entry("u1", "u2"), bb=entry("u1"), cc=entry("u2"))
    assert old.without({"u1"}) == record(aa=entry("u2"), cc=entry("u2"))
    assert old.merged(record(dd=entry("u1"))) == record(aa=entry("u2"), cc=entry("u2"), dd=entry("u1"))
    assert old.without({"u1", "u2"}) == record()


BAD: dict[str, tuple[str, str, str]] = {
    "another format": ('"format": 1', '"format": 2', "is a tuning record of format 2, expected 1"),
    "cut off": ('"units": [', '"units": ', "is not a tuning record: JSON is malformed"),
    "another field": ('"us"', '"ms"', r"is not a tuning record: kernels.aa.ms: unknown key"),
    "a text": ('"XBLOCK": 256', '"XBLOCK": "wide"', "kernels.aa.configuration.XBLOCK: 'wide' is text, expected a whole number"),
    "no power of two": ('"XBLOCK": 256', '"XBLOCK": 100', "XBLOCK is 100, expected a power of two"),
    "negative": ('"XBLOCK": 256', '"XBLOCK": -4', "XBLOCK is -4, expected a power of two"),
    "warps": ('"num_warps": 2', '"num_warps": 64', "num_warps is 64, expected 1 to 32"),
    "no stages": ('"num_stages": 1', '"num_stages": 0', "num_stages is 0, expected 1 to 16"),
    "another name": ('"num_stages": 1', '"num_ctas": 1', r"kernel aa \(triton_poi_fused_relu_0\): there is no num_stages"),
    "a split": ('"XBLOCK": 256', '"RSPLIT": 256', "RSPLIT is no size of a block"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_record(name: str, tmp_path: Path) -> None:
    old, new, message = BAD[name]
    text = tuning.encode(record(aa=entry("u"))).decode()
    assert old in text
    with pytest.raises(UsageError, match=message) as caught:
        tuning.decode(text.replace(old, new).encode(), "mine.json")
    assert caught.value.hint == "`fxc tune` writes one"
    cache = Cache.open(tmp_path)
    cache.update_tuning(tuning.file_name(H200), lambda data: text.replace(old, new).encode())
    with pytest.raises(DamagedError, match=message) as damaged:
        tuning.find("auto", cache, H200)
    assert f"remove {cache.layout.tuning / tuning.file_name(H200)}" in damaged.value.hint


@pytest.mark.parametrize("data", [b"", b"[]", b'{"kernels": {}}', b"\xff", b"[" * 5000])
def test_something_else_is_no_record(data: bytes) -> None:
    with pytest.raises(UsageError, match="mine.json is not a tuning record"):
        tuning.decode(data, "mine.json")


def test_find(tmp_path: Path) -> None:
    """The record, and what an artifact must have been built with to be found without a trace."""
    cache, one, file = Cache.open(tmp_path / "cache"), record(aa=entry("u")), tmp_path / "mine.json"
    assert tuning.find("none", cache, H200) == (None, "")
    assert tuning.find("auto", cache, H200) == (None, None)
    file.write_bytes(tuning.encode(one))
    assert tuning.find(str(file), cache, H200) == (one, one.digest)
    cache.update_tuning(tuning.file_name(H200), lambda data: tuning.encode(one))
    assert tuning.find("auto", cache, H200) == (one, one.digest)
    assert tuning.find("auto", cache, here()) == (None, None), "a CPU has none"
    assert tuning.find("auto", cache, msgspec.structs.replace(H200, torch="2.13.0")) == (None, None)
    cache.update_tuning(tuning.file_name(H200), lambda data: tuning.encode(record()))
    assert tuning.find("auto", cache, H200) == (None, None), "it holds nothing"
    file.write_bytes(tuning.encode(record()))
    assert tuning.find(str(file), cache, H200) == (record(), ""), "as built without a record"


def test_the_records_of_all_places(tmp_path: Path) -> None:
    """Own times stand over those of a read-only place, which say the rest; damage is reported where it is."""
    base, name = Cache.open(tmp_path / "base"), tuning.file_name(H200)
    base.update_tuning(name, lambda data: tuning.encode(record(aa=entry("u1", "u2"), bb=entry("u3"))))
    cache = Cache.open(tmp_path / "own", {"FXC_CACHE_PATH": str(tmp_path / "base")})
    own = {**FAST, "num_warps": 8}
    cache.update_tuning(name, lambda data: tuning.encode(record(aa=entry("u2", configuration=own), cc=entry("u3"))))
    both = record(aa=entry("u1", "u2", configuration=own), cc=entry("u3"))
    assert tuning.find("auto", cache, H200) == (both, both.digest)
    base.update_tuning(name, lambda data: b"{}")
    path = base.layout.tuning / name
    with pytest.raises(DamagedError, match=f"^{path} is not a tuning record") as damaged:
        tuning.find("auto", cache, H200)
    assert damaged.value.hint == "take its place out of FXC_CACHE_PATH, or remove it"


OTHERS = {
    "NVIDIA H100": msgspec.structs.replace(H200, properties={"name": "NVIDIA H100"}),
    "compute capability 8.0": msgspec.structs.replace(H200, compute_capability=(8, 0)),
    "torch 2.13": msgspec.structs.replace(H200, torch="2.13.1+cu130"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_record_for_something_else_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(tuning.encode(record()))
    with pytest.raises(UsageError, match=f"is of NVIDIA H200, compute capability 9.0, torch 2.11, .* {name}"):
        tuning.find(str(file), Cache.open(tmp_path), OTHERS[name])
    assert tuning.find(str(file), Cache.open(tmp_path), msgspec.structs.replace(H200, torch="2.11.3"))[0] == record()


def test_no_file_and_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no.json cannot be read: No such file"):
        tuning.find(str(tmp_path / "no.json"), Cache.open(tmp_path), H200)
    with pytest.raises(UsageError, match="--tuning mine.json: the model is for device cpu"):
        tuning.find("mine.json", Cache.open(tmp_path), here())


# What a unit takes of it


def test_a_unit_takes_what_was_found_in_it() -> None:
    unit = made()
    tuned = record(aa=entry(unit.scope), bb=entry("another")).apply(unit)
    assert tuned.told() == {**dict(unit.options), "autotune_lookup_table": {"aa": FAST}}
    assert tuned.key != unit.key
    assert unit.told() == dict(unit.options)


def test_entries_of_other_units_change_no_key() -> None:
    unit = made()
    assert record(bb=entry("another")).apply(unit) == unit
    one = record(aa=entry(unit.scope)).apply(unit)
    assert record(aa=entry("another", unit.scope, us=1.0), bb=entry("another")).apply(unit) == one
    other = {**FAST, "num_warps": 8}
    assert record(aa=entry(unit.scope, configuration=other)).apply(unit).key != one.key


def test_forms_take_it_too() -> None:
    plain, other = made(), dataclasses.replace(made(), text="def piece(): pass\n", passes="noop:1")
    tuned = record(aa=entry(plain.scope)).apply(
        dataclasses.replace(other, forms=((frozenset({"noop"}), plain),), fusions=("noop",))
    )
    assert not tuned.tuning
    assert tuned.form(frozenset({"noop"})).tuning == '{"aa":{"XBLOCK":256,"num_stages":1,"num_warps":2}}'


def test_a_unit_is_named_by_what_is_compiled() -> None:
    """Text after passes and sizes, whatever it is for."""
    unit = made()
    same = [made(name="piece_7"), made(target=H200), dataclasses.replace(unit, options=(), record="h200")]
    assert {one.scope for one in same} == {unit.scope}
    others = [made(box=unit.range.replace("n", 8, 8)), dataclasses.replace(unit, text="def piece(): pass\n")]
    assert len({unit.scope, *(one.scope for one in others)}) == 3


def test_in_a_plan() -> None:
    """The artifact's name and the keys of the units that take something of the record; nothing else."""
    plain = plan_of(calls.ActInside, level=2, sizes=[4])
    first = plain.units[0]
    spec = spec_of(calls.ActInside, level=2, sizes=[4])
    unused = make_plan(spec, HERE, here(), tuning=record(bb=entry("another")))
    assert (unused.manifest.hash, unused.units) == (plain.manifest.hash, plain.units)
    assert (unused.manifest.tuning, plain.manifest.tuning) == (record(bb=entry("another")).digest, "")
    tuned = make_plan(spec, HERE, here(), tuning=record(aa=entry(first.scope)))
    assert tuned.manifest.hash != plain.manifest.hash
    changed = [unit.label for unit, was in zip(tuned.units, plain.units, strict=True) if unit.key != was.key]
    assert changed == [first.label]
    names = {f.name for f, was in zip(tuned.manifest.factors, plain.manifest.factors, strict=True) if f != was}
    assert names == {"tuning"}


def test_in_a_plan_whose_fusions_are_timed(tmp_path: Path) -> None:
    """What only a form takes changes the key of the unit that is chosen from it, and so the artifact's name."""
    (tmp_path / "model.py").write_text(MODEL)
    spec = parse_spec({
        "model": {"target": "./model.py:Gated"}, "device": "cpu",
        "inputs": {"x": {"shape": ["n", 128], "dtype": "float32"}},
        "dims": {"n": {"min": 1, "max": 64}}, "compile": {"level": 3},
    })  # fmt: skip
    plain = make_plan(spec, tmp_path, here())
    (unit,) = plain.units
    ((_, form),) = unit.forms
    tuned = make_plan(spec, tmp_path, here(), tuning=record(aa=entry(form.scope)))
    assert (tuned.units[0].tuning, tuned.units[0].key != unit.key) == ("", True)
    assert tuned.manifest.hash != plain.manifest.hash
    names = {f.name for f, was in zip(tuned.manifest.factors, plain.manifest.factors, strict=True) if f != was}
    assert names == {"tuning"}


@pytest.mark.parametrize(("now", "found"), [(None, True), ("one", True), ("two", False), ("", False)])
def test_the_lookup(now: str | None, found: bool, tmp_path: Path) -> None:
    """An artifact is found by builds with the same record, and where any will do."""
    cache = Cache.open(tmp_path)
    manifest = msgspec.structs.replace(make_manifest(), tuning="one", sources=(Source(file="a.py", digest="1"),))
    cache.publish(manifest, "rank_0_0", {}, ())
    cache.remember("d" * 32, manifest.hash, identity.index_sources(manifest))
    compare = identity.comparer(tmp_path, compiler=False, tuning=now)
    hit = cache.lookup("d" * 32, lambda source: "1" if source.file == "a.py" else compare(source))
    assert hit == (manifest.hash if found else None)


def test_an_artifact_without_a_record() -> None:
    assert Source(file=identity.TUNING, digest="") in identity.index_sources(plan_of(calls.ActInside).manifest)


def test_rules_are_left_as_they_are() -> None:
    """What is timed is what a build by rules compiles."""
    assert (
        inductor_options.options(2, True, H200, clock=False)
        == dict(made(target=H200).options) | inductor_options.BY_RULES
    )
