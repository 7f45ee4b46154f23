"""What a liar writes: values that no program of ours does, with the digests made good again. Refused, or what it says is
done; never a traceback."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import handmade
import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given

from fxc.cache import Cache
from fxc.cli.main import run
from fxc.errors import DamagedError, RunError
from fxc.manifest import decode, encode
from tests.cache.conftest import PIECE

from . import world
from .conftest import put
from .mutations import DEEP, ODD, changed_value
from .test_bytes import RANDOM, fuzz

CODES = (3, 4, 5)


def loaded(path: Path) -> str:
    """What a load comes to. A program that takes other weights or inputs than this test has is one all the same."""
    return world.outcome(lambda: world.load(path), CODES, RunError)


def test_the_manifest(cache: Cache) -> None:
    path = world.only(cache)
    value = world.opened((path / "manifest.json").read_bytes())

    @fuzz(500)
    @given(RANDOM)
    def check(chance: Random) -> None:
        put(path / "manifest.json", world.sealed(json.dumps(changed_value(value, chance))))
        loaded(path)

    check()


def test_the_manifest_through_the_command_line(cache: Cache, capfd: pytest.CaptureFixture[str]) -> None:
    path = world.only(cache)
    value = world.opened((path / "manifest.json").read_bytes())
    place = ("--cache-dir", str(cache.root.parent))
    verbs = ("ls", "inspect", "verify", "warm", "export", "why")

    @fuzz(30)
    @given(RANDOM)
    def check(chance: Random) -> None:
        put(path / "manifest.json", world.sealed(json.dumps(changed_value(value, chance))))
        verb = chance.choice(verbs)
        target = () if verb == "ls" else (str(path),) if verb != "why" else (str(path), str(path))
        more = {"export": (str(cache.root.parent / "x.tar"),), "warm": ("--no-run",)}.get(verb, ())
        code = run([verb, *target, *more, *place])
        told = capfd.readouterr()
        assert "fault of fxc" not in told.err, (verb, told.err)
        assert "Traceback" not in told.err
        assert code in (0, *CODES), (verb, told.err)

    check()


@pytest.mark.parametrize(
    "text",
    [
        "{" + '"hash":' * 3 + "1}",
        '{"format": 1, "hash": ' + "[" * DEEP + "]" * DEEP + "}",
        '{"a":' * DEEP + "1" + "}" * DEEP,
        '{"format": NaN}',
        '{"format": 1e400}',
        '{"format": ' + "9" * 5000 + "}",
        '{"format": "1"}',
        '{"hash": "\\ud800"}',
        '{"hash": "\udc80"}',
        "{}",
        "[]",
        '{"format": 1, "format": 1}',
    ],
    ids=range(12),
)
def test_texts(cache: Cache, text: str) -> None:
    path = world.only(cache)
    for sealed in (world.sealed(text), text.encode("utf-8", "surrogatepass")):
        put(path / "manifest.json", sealed)
        assert world.outcome(lambda: world.load(path), (5,)) == "DamagedError"
        assert [entry.manifest for entry in cache.list()] == [None]
        put(cache.root / "index" / f"{world.DIRECT}.json", sealed)
        assert cache.lookup(world.DIRECT, lambda source: source.digest) is None
        put(cache.root / "binaries" / PIECE / "record.json", sealed)
        with pytest.raises(DamagedError):
            cache.binary_files(PIECE)


def test_keys_that_are_there_twice(cache: Cache) -> None:
    """The last one counts, for the check and for the use."""
    path = world.only(cache)
    text = json.dumps(world.opened((path / "manifest.json").read_bytes()))
    put(path / "manifest.json", world.sealed('{"model": 1, ' + text[1:]))
    assert loaded(path) == "DamagedError"
    put(path / "manifest.json", world.sealed('{"model": "Other", ' + text[1:]))
    assert world.load(path).tolist() == world.RIGHT
    assert world.manifest_of(cache).model == "Tiny"


def test_names_of_files(cache: Cache) -> None:
    """Of those that a manifest lists: none leads out, none is created."""
    path = world.only(cache)
    value = world.opened((path / "manifest.json").read_bytes())
    for name in [entry for entry in ODD if isinstance(entry, str)] + ["rank_0_0/../../x", "rank_0_0//x", "rank_1_0/x"]:
        files = value["ranks"]["rank_0_0"]["files"]
        changed = {**files, name: files["rank_0_0/transformed_code.py"]}
        for ranks in ({"rank_0_0": {**value["ranks"]["rank_0_0"], "files": changed}}, {**value["ranks"], name: value["ranks"]["rank_0_0"]}):  # fmt: skip
            put(path / "manifest.json", world.sealed(json.dumps({**value, "ranks": ranks})))
            assert loaded(path) in ("DamagedError", "UntrustedError"), name


def relist(path: Path, name: str, data: bytes) -> None:
    """Put a file in, and its digest into the manifest."""
    put(path / "rank_0_0" / name, data)
    manifest = decode((path / "manifest.json").read_bytes(), "")
    rank = manifest.ranks["rank_0_0"]
    entry = msgspec.structs.replace(
        rank.files[f"rank_0_0/{name}"], bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    rank = msgspec.structs.replace(rank, files={**rank.files, f"rank_0_0/{name}": entry})
    put(path / "manifest.json", encode(msgspec.structs.replace(manifest, ranks={"rank_0_0": rank})))


@pytest.mark.parametrize(
    "tensors",
    [
        {"other": torch.ones(4)},
        {"bias": torch.ones(5)},
        {"bias": torch.ones(4, dtype=torch.float64)},
        {"bias": torch.ones(())},
    ],
)
def test_other_constants(cache: Cache, tensors: dict[str, torch.Tensor]) -> None:
    path = world.only(cache)
    relist(path, "constants.safetensors", safetensors.torch.save(tensors))
    assert loaded(path) == "DamagedError"


def header(value: Any, data: bytes = b"") -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text + data


BIAS = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 100,
        (2**40).to_bytes(8, "little") + b"{}",
        header({"bias": BIAS}, b"\0" * 15),
        header({"bias": {**BIAS, "data_offsets": [0, 2**63]}}, b"\0" * 16),
        header({"bias": {**BIAS, "data_offsets": [16, 0]}}, b"\0" * 16),
        header({"bias": {**BIAS, "shape": [2**62, 4]}}, b"\0" * 16),
        header({"bias": {**BIAS, "shape": [-4]}}, b"\0" * 16),
        header({"bias": {**BIAS, "dtype": "F33"}}, b"\0" * 16),
        header({"bias": {**BIAS, "dtype": "F8_E8M0", "shape": [16]}}, b"\0" * 16),
        header([]),
    ],
    ids=range(12),
)
def test_constants_that_are_none(cache: Cache, data: bytes) -> None:
    path = world.only(cache)
    relist(path, "constants.safetensors", data)
    assert loaded(path) == "DamagedError"


@pytest.mark.parametrize(
    ("code", "came"),
    [
        ("def", "is no program: invalid syntax"),
        ("x = 1\0", "is no program: source code string cannot contain null bytes"),
        ("x = " + "(" * 5000 + ")" * 5000, "is no program"),
        ("x = '\udcff'", "is no program"),
        ("", "lists other weights than manifest.json"),
        ("WEIGHTS = ('linear.weight', 'bias')", "has no step 'step_0'"),
        (f"{handmade.LINEAR}PIECES = {{}}", "has no step 'step_0'"),
    ],
    ids=range(7),
)
def test_code_that_is_none(cache: Cache, code: str, came: str) -> None:
    path = world.only(cache)
    relist(path, "transformed_code.py", code.encode("utf-8", "surrogateescape"))
    with pytest.raises(DamagedError) as caught:
        world.load(path)
    assert came in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("which", ["index", "record"])
def test_sealed_shortcuts(cache: Cache, tmp_path: Path, which: str) -> None:
    """An index entry or a record with any values is a hit on something that is there, or a miss."""
    over = Cache.open(tmp_path / "over", {"FXC_CACHE_PATH": str(cache.root.parent)})
    digests = {source.file: source.digest for source in world.SOURCES}
    file = cache.root / "index" / f"{world.DIRECT}.json" if which == "index" else cache.root / "binaries" / PIECE / "record.json"  # fmt: skip
    value = world.opened(file.read_bytes())
    look: dict[str, Callable[[], object]] = {
        "index": lambda: over.lookup(world.DIRECT, lambda source: digests.get(source.file)) in (None, world.only(cache).name),
        "record": lambda: over.binary(PIECE) is None or [path.name for path in over.binary_files(PIECE)] == [f"{PIECE}.so"],
    }  # fmt: skip

    @fuzz(150)
    @given(RANDOM)
    def check(chance: Random) -> None:
        put(file, world.sealed(json.dumps(changed_value(value, chance))))
        assert look[which]() is True

    check()


def test_a_hash_that_leads_out(cache: Cache) -> None:
    """An index entry whose artifact is a path."""
    elsewhere = os.path.relpath(world.only(cache), cache.root / "artifacts")
    for name in (f"../artifacts/{elsewhere}", str(world.only(cache)), "..", ".", ""):
        entry = {"entries": [{"hash": name, "sources": []}]}
        put(cache.root / "index" / f"{world.DIRECT}.json", world.sealed(json.dumps(entry)))
        assert cache.lookup(world.DIRECT, lambda source: None) is None, name
