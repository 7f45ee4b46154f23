"""`fxc target`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fxc import records


def test_ls(fxc: Any) -> None:
    found = {entry["target"]: entry for entry in fxc("target", "ls", "--json").json["targets"]}
    assert list(found) == ["a100", "b200", "h100", "h200", "l4", "l40s"]
    assert found["l4"]["compute_capability"] == [8, 9]
    assert all(entry["source"] for entry in found.values())
    assert "NVIDIA L40S" in fxc("target", "ls").err


def test_show(fxc: Any) -> None:
    told = fxc("target", "show", "h200", "--json")
    assert told.json["properties"]["multi_processor_count"] == 132
    shown = fxc("target", "show", "h200").err
    assert re.search(r"^shared_memory_per_block_optin +232448", shown, re.MULTILINE)
    assert fxc("target", "show", "h20").code == 2


def test_dump_and_show_of_this_machine(fxc: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "probe", lambda: records.find("l4"))
    file = tmp_path / "mine.json"
    assert fxc("target", "dump", str(file)).err == f"NVIDIA L4 in {file}\n"
    assert json.loads(file.read_text())["properties"]["name"] == "NVIDIA L4"
    assert fxc("target", "show", str(file), "--json").json == fxc("target", "show", "--json").json
    assert fxc("target", "dump", str(tmp_path / "no" / "mine.json")).code == 1
