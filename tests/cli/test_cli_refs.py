"""Every verb and `fxc.load` take the same for an artifact, and say the same where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import fxc as package
from fxc.cache import Artifact
from fxc.errors import CacheMissError, FxcError, UsageError

VERBS = (("inspect", "--json"), ("verify", "--json"), ("warm", "--json", "--require-hit"))
HINT = "`fxc ls` lists what there is, `fxc build` makes it"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
@pytest.mark.parametrize("ref", ["ABCD", "{hash}", "model.yaml", "./model.yaml", "{path}", "moved", "./moved"])
def test_what_may_be_written(
    fxc: Any, artifact: Artifact, found: dict[str, str], ref: str, verb: tuple[str, ...]
) -> None:
    found["hash"] = artifact.manifest.hash
    Path("abcd").mkdir()  # no artifact: the hash is meant
    Path("moved").symlink_to(artifact.path)
    written = ref.format(hash=artifact.manifest.hash, path=artifact.path)
    told = fxc(verb[0], written, *verb[1:])
    assert told.code == 0, told
    entry = told.json["artifacts"][0] if verb[0] == "verify" else told.json
    assert entry["hash"] == artifact.manifest.hash
    assert package.load(written).manifest.hash == artifact.manifest.hash


@pytest.mark.parametrize(
    ("ref", "message", "hint"),
    [
        ("model.yaml", "model.yaml is not built, or was changed since",
         "run `fxc build model.yaml`, or name a build with options by its hash; `fxc why model.yaml` tells more"),
        ("dddd", "no artifact dddd in {cache}", "`fxc ls` lists what there is"),
        ("./dddd", "dddd is not an artifact: it has no manifest.json", HINT),
        ("{cache}", "{cache} is not an artifact: it has no manifest.json", HINT),
    ],
)  # fmt: skip
def test_what_leads_nowhere(fxc: Any, found: dict[str, str], tmp_path: Path, ref: str, message: str, hint: str) -> None:
    ref, message = (text.format(cache=tmp_path / "cache" / "v1") for text in (ref, message))
    error = {"code": 3, "kind": "CacheMissError", "message": message, "hint": hint}
    for verb in VERBS:
        assert fxc(verb[0], ref, *verb[1:]).json == {"error": error}
    with pytest.raises(CacheMissError) as caught:
        package.load(ref)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("zzzz", "'zzzz' is not a hash: expected hexadecimal digits"),
        ("abc", "'abc' is too short: expected at least 4 digits of the hash"),
        ("no.yaml", "no.yaml does not exist"),
    ],
)
def test_what_cannot_be_meant(fxc: Any, artifact: Artifact, ref: str, message: str) -> None:
    for verb in VERBS:
        told = fxc(verb[0], ref, *verb[1:])
        assert (told.code, told.json["error"]["message"]) == (2, message)
    with pytest.raises(FxcError) as caught:
        package.load(ref)
    assert caught.value.message == message


def test_looking_is_no_use(fxc: Any, artifact: Artifact, found: dict[str, str]) -> None:
    file = artifact.path / "manifest.json"
    found["hash"] = artifact.manifest.hash
    for arguments, used in [(("inspect", "abcd"), False), (("verify", "model.yaml"), False), (("warm", "abcd"), True)]:
        os.utime(file, (1, 1))
        assert fxc(*arguments).code == 0
        assert (file.stat().st_mtime > 1) == used


@pytest.mark.parametrize("ref", [None, 5, b"abcd"])
def test_what_names_nothing(ref: Any) -> None:
    for function in (package.load, package.warm):
        with pytest.raises(UsageError) as info:
            function(ref)
        assert info.value.message == (
            f"{ref!r} is {type(ref).__name__}, expected the prefix of a hash, or the path of an artifact or model.yaml"
        )
