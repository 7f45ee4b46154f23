"""Runs every code block of README.md: commands, Python, model.yaml files, and the session with its output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from fxc.spec import parse_spec

ROOT = Path(__file__).parent.parent
SCRIPTS = ("./scripts/", "pip install")
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


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `fxc` and `python` are this interpreter's, and the cache is that of test_examples."""
    here = tmp_path_factory.mktemp("home")
    cache = tmp_path_factory.getbasetemp() / "examples-cache"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "FXC_CACHE_DIR": str(cache), "HOME": str(here)}
    built = shell("fxc build examples/tiny_llama.yaml", environ)
    return {**environ, "HASH": built.strip()}


def shell(script: str, environ: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr if "2>&1" in script else done.stdout


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {block.language for block in BLOCKS} <= {"bash", "console", "yaml", "python", ""}


@of("bash")
def test_bash(block: Block, sandbox: dict[str, str]) -> None:
    lines = []
    for line in block.text.splitlines():
        if line.startswith("./scripts/"):
            assert os.access(ROOT / line.split()[0], os.X_OK)
        if not line.startswith(SCRIPTS):
            lines.append(line)
    shell("\n".join(lines), sandbox)


@of("python")
def test_python(block: Block, sandbox: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.text], cwd=ROOT, env=sandbox, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@of("yaml")
def test_yaml(block: Block) -> None:
    parse_spec(yaml.safe_load(block.text), f"README.md:{block.line}")


def skeleton(line: str) -> str:
    """A line of output without what differs from run to run: numbers with their units, hashes, paths."""
    line = re.sub(r"\b[0-9a-f]{12,}\b", "HASH", line)
    line = re.sub(r"(?<!\w)[\d.]+(e[-+]?\d+)?( ?(µs|ms|s|min|B|kB|MB|GB)\b)?", "#", line)
    return " ".join(re.sub(r"\S*/\S*", "PATH", line).split())


@of("console")
def test_session(block: Block, sandbox: dict[str, str]) -> None:
    """Each command runs, and prints every line that README shows; `...` stands for lines left out."""
    commands = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    for entry in commands:
        command, _, output = entry.partition("\n")
        if command.startswith(SCRIPTS):
            continue
        printed = {skeleton(line) for line in shell(f"( {command} ) 2>&1", sandbox).splitlines()}
        missing = [line for line in output.splitlines() if line != "..." and skeleton(line) not in printed]
        assert not missing, f"{command} printed\n" + "\n".join(sorted(printed))


def test_exit_codes_and_json_keys_are_the_real_ones(sandbox: dict[str, str]) -> None:
    for verb in ("build", "warm"):
        listed = re.search(rf"^\| `{verb}` \| (.*) \|$", README, re.MULTILINE)
        assert listed is not None
        found = json.loads(shell(f"fxc {verb} examples/tiny_llama.yaml --json", sandbox))
        named = set(re.findall(r"`(\w+)`", listed[1]))
        assert set(found) <= named
        assert set(found["seconds"]) <= named
