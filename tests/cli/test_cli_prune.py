"""`fxc prune`: what it prints, and that a loaded program keeps its artifact."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import fxc as package
from fxc import machine
from fxc.cache import Artifact
from fxc.cli import amounts
from fxc.errors import IncompatibleError, UsageError
from fxc.target import Target

HASH = "abcd" + "0" * 28


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("2w", 1209600), ("1.5d", 129600), ("0s", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert amounts.seconds(text, "--older-than") == seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("500", 500), ("20k", 20000), ("20K", 20000), ("1M", 10**6), ("20G", 20 * 10**9), ("1.5GB", 15 * 10**8), ("2T", 2 * 10**12),
     ("20Gi", 20 << 30), ("1KiB", 1024), ("512 MiB", 512 << 20), ("0", 0)],
)  # fmt: skip
def test_numbers_of_bytes(text: str, count: int) -> None:
    assert amounts.number_of_bytes(text, "--max-bytes") == count


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 days", "7x", "inf"])
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError, match="--older-than .* is no duration"):
        amounts.seconds(text, "--older-than")


@pytest.mark.parametrize("text", ["", "G", "-1", "20X", "20g", "1e9", "20GG"])
def test_no_numbers_of_bytes(text: str) -> None:
    with pytest.raises(UsageError, match="--max-bytes .* is no number of bytes"):
        amounts.number_of_bytes(text, "--max-bytes")


def test_json(fxc: Any, artifact: Artifact) -> None:
    dry = fxc("prune", "--keep-latest", "0", "--dry-run", "--json", "-q")
    assert (dry.code, dry.err) == (0, "")
    assert list(dry.json) == ["removed", "in_use", "binaries", "building", "staging", "bytes", "dry_run"]
    assert [(entry["hash"], entry["reason"]) for entry in dry.json["removed"]] == [(HASH, "keep-latest")]
    assert artifact.path.exists()
    done = fxc("prune", "--keep-latest", "0", "--json")
    assert done.json == {**dry.json, "dry_run": False}
    assert not artifact.path.exists()


def test_for_people(fxc: Any, artifact: Artifact) -> None:
    told = fxc("prune", "--older-than", "1h")
    assert (told.code, told.out) == (0, "")
    assert told.err.startswith("0 artifacts removed, 0 B; ")
    first, last = fxc("prune", "--older-than", "0s", "--dry-run").err.splitlines()
    assert first.startswith(f"would remove {HASH}  ")
    assert first.endswith(" ago (--older-than)")
    assert last.startswith("1 artifact to remove, ")
    assert last.endswith("; 0 B would stay")


@pytest.mark.parametrize(
    ("option", "value"), [("--older-than", "soon"), ("--max-bytes", "lots"), ("--keep-latest", "-1")]
)
def test_wrong_usage(fxc: Any, artifact: Artifact, option: str, value: str) -> None:
    assert fxc("prune", option, value).code == 2
    assert artifact.path.exists()


def test_a_loaded_program_keeps_its_artifact(fxc: Any, artifact: Artifact) -> None:
    program = package.load(HASH)
    told = fxc("prune", "--keep-latest", "0")
    assert told.err.splitlines()[0] == f"kept {HASH}  in use"
    assert artifact.verify() == 2
    del program
    gc.collect()
    assert [entry["hash"] for entry in fxc("prune", "--keep-latest", "0", "--json").json["removed"]] == [HASH]


def test_a_load_that_fails_keeps_nothing(fxc: Any, artifact: Artifact) -> None:
    (artifact.path / "rank_0_0/transformed_code.py").write_text("1 / 0")
    assert fxc("warm", "abcd").code == 5
    gc.collect()
    assert fxc("prune", "--keep-latest", "0", "--json").json["in_use"] == []
    assert not artifact.path.exists()


def test_incompatible(fxc: Any, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fxc("prune", "--incompatible", "--json").json["removed"] == []
    older = Target(device="cpu", arch="x86_64", cpu_features=(), torch="1.0.0")
    monkeypatch.setattr(machine, "here", lambda device: older)
    assert [entry["reason"] for entry in fxc("prune", "--incompatible", "--dry-run", "--json").json["removed"]] == [
        "incompatible"
    ]

    def no_device(device: str) -> Target:
        raise IncompatibleError("there is no such device")

    monkeypatch.setattr(machine, "here", no_device)
    assert [entry["hash"] for entry in fxc("prune", "--incompatible", "--json").json["removed"]] == [HASH]
    assert list((Path("cache") / "v1" / "artifacts").iterdir()) == []
