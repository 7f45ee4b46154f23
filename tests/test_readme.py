"""Runs every code block of README.md: commands, Python, model.yaml files, and the session with its output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import yaml

from fxc.bench import Captured
from fxc.spec import parse_spec
from tests.conftest import ROOT, Built

NOT_RUN = ("./scripts/", "pip install")
"""Lines that start so install things; they are looked at, not run."""


class Block(NamedTuple):
    language: str
    text: str
    line: int

    @property
    def id(self) -> str:
        return f"{self.language or 'text'}-{self.line}"


def blocks(text: str) -> list[Block]:
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], match[2], text.count("\n", 0, match.start()) + 1) for match in fences]


README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = blocks(README)


def of(language: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.language == language]
    assert found, f"README.md has no {language} block"
    return pytest.mark.parametrize("block", found, ids=[block.id for block in found])


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {block.language for block in BLOCKS} <= {"bash", "console", "yaml", "python", ""}


@of("bash")
def test_bash(block: Block, built: Built) -> None:
    for line in block.text.splitlines():
        if line.startswith("./scripts/"):
            assert os.access(ROOT / line.split()[0], os.X_OK)
    built.shell("\n".join(line for line in block.text.splitlines() if not line.startswith(NOT_RUN)))


@of("python")
def test_python(block: Block, built: Built) -> None:
    command = [sys.executable, "-W", "error", "-c", block.text]
    done = subprocess.run(command, cwd=ROOT, env=built.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@of("yaml")
def test_yaml(block: Block) -> None:
    parse_spec(yaml.safe_load(block.text), f"README.md:{block.line}")


def skeleton(line: str) -> str:
    """A line of output without what differs from run to run and between machines: numbers and their units, hashes."""
    line = re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b", "HASH", line)
    line = re.sub(r"(?<![\w.])\d[\d.]*(e[-+]\d+)?( (µs|ms|s|min|B|kB|MB|GB)\b)*", "#", line)
    return " ".join(re.sub(r"#( #)+", "#", line).split())


@of("console")
def test_session(block: Block, built: Built) -> None:
    """Each command prints every line that README shows; `...` stands for what was left out."""
    for entry in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = entry.partition("\n")
        if command.startswith(NOT_RUN):
            continue
        out = built.log if command.startswith("HASH=$(fxc build ") else built.shell(command, both=True)
        printed = {skeleton(line) for line in out.splitlines()}
        missing = [line for line in shown.splitlines() if line.strip() != "..." and skeleton(line) not in printed]
        assert not missing, f"{command} printed\n" + "\n".join(sorted(printed))


def test_json_keys_are_the_real_ones(built: Built) -> None:
    for verb in ("build", "warm"):
        listed = re.search(rf"^\| `{verb}` \| (.*) \|$", README, re.MULTILINE)
        assert listed is not None
        found = json.loads(built.shell(f"fxc {verb} examples/tiny_llama.yaml --json"))
        named = set(re.findall(r"`(\w+)`", listed[1]))
        assert set(found) | set(found["seconds"]) <= named
    listed = re.search(r"^\| `bench` \| (.*) \|$", README, re.MULTILINE)
    assert listed is not None
    found = json.loads(built.shell("fxc bench $HASH --sizes 8 --repeats 1 --json"))
    (size,) = found["sizes"]
    graphs = set(Captured.__struct_fields__)
    assert set(re.findall(r"`(\w+)`", listed[1])) == {*found, *size, *size["times"]["eager"], *graphs}
