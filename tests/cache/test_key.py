from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fxc.cache import key

BASE = [("graph", "a"), ("torch", "2.13.0")]


def test_digest_is_32_hex_digits_of_xxh3() -> None:
    assert key.digest(b"") == "99aa06d3014798d86001c324468d497f"  # the algorithm's own test vector
    assert key.digest("é") == key.digest("é".encode())
    assert key.digest("a") != key.digest("b")


@pytest.mark.parametrize(
    "factors",
    [
        pytest.param([("graph", "b"), ("torch", "2.13.0")], id="a value"),
        pytest.param([("text", "a"), ("torch", "2.13.0")], id="a name"),
        pytest.param([("torch", "2.13.0"), ("graph", "a")], id="the order"),
        pytest.param([("graph", "a")], id="one less"),
        pytest.param([*BASE, ("", "")], id="an empty one more"),
        pytest.param([("graph", "atorch"), ("", "2.13.0")], id="where one ends"),
        pytest.param([("grapha", ""), ("torch", "2.13.0")], id="where a name ends"),
        pytest.param([("graph", "1:a5:torch6:2.13.0")], id="text that looks like an encoding"),
        pytest.param([("graph", "a"), ("torch", "2.13.0\n")], id="a line end"),
    ],
)
def test_combine_depends_on(factors: list[tuple[str, str]]) -> None:
    assert key.combine(factors) != key.combine(BASE)


def test_combine_does_not_depend_on_the_kind_of_sequence() -> None:
    assert key.combine(tuple(BASE)) == key.combine(list(BASE))


@pytest.mark.parametrize("environ", [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "HOME": "/x", "USER": "x"}])
def test_combine_does_not_depend_on_the_process(environ: dict[str, str], tmp_path: Path) -> None:
    code = f"from fxc.cache import key; print(key.combine({BASE!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == key.combine(BASE)


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert key.sha256(b"abc") == expected
    assert key.sha256_file(tmp_path / "file") == expected
