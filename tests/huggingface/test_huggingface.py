"""Folders with a config.json, through the whole pipeline, against stock eager.

Two architectures are compiled by default; FXC_TEST_ALL=1 compiles all seventeen, in five minutes on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fxc
from fxc import machine
from fxc.errors import WeightError
from fxc.plan import Plan, make_plan
from fxc.prove import strides
from fxc.runtime.program import Program
from fxc.spec import load_spec
from tests.building import program_of
from tests.huggingface import stock
from tests.passes.pieces import execute, inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*:UserWarning")

ALL = bool(os.environ.get("FXC_TEST_ALL"))
COMPILED = stock.ARCHITECTURES if ALL else ["gpt_oss", "bert"]
PLANNED = stock.ARCHITECTURES if ALL else ["gpt_oss"]


def plan_of(path: Path) -> Plan:
    return make_plan(load_spec(path), path.parent, machine.probe("cpu"))


def uncompiled(path: Path) -> Program:
    return program_of(plan_of(path))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("huggingface")


@pytest.mark.parametrize("architecture", COMPILED)
def test_compiled(cache: Path, architecture: str) -> None:
    """Equals stock eager in float32; a server loads it and binds a checkpoint without transformers."""
    path = stock.write(cache / architecture, architecture)
    result = fxc.build(path, cache_dir=cache)
    program = fxc.load(result.hash, cache_dir=cache)
    model = stock.stock(path.parent)
    found = stock.errors(program.bind(model), model)
    print(f"{architecture}: {result.unique_pieces} of {result.pieces} pieces, {result.seconds['total']:.1f} s, {found}")
    assert max(found.values()) < 1e-5
    assert max(line.max_rel_err for line in result.proof) < 1e-4
    model.save_pretrained(path.parent)
    code = (
        f"import sys, fxc; fxc.load({result.hash!r}, cache_dir={str(cache)!r}).bind({str(path.parent)!r}); "
        "print({'transformers', 'torch._dynamo', 'sympy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@pytest.mark.parametrize("architecture", stock.ARCHITECTURES)
def test_uncompiled(tmp_path: Path, architecture: str) -> None:
    """Traced, cut and stitched; and bound to what `save_pretrained` writes, in names and layouts of checkpoints."""
    path = stock.write(tmp_path, architecture, level=0)
    program = uncompiled(path)
    model = stock.stock(tmp_path)
    model.save_pretrained(tmp_path)
    assert max(stock.errors(program.bind(tmp_path), model).values()) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss"])
def test_bfloat16(cache: Path, tmp_path: Path, architecture: str) -> None:
    """Roundings differ, and may choose another expert: means are compared, against float32 too."""
    path = stock.write(tmp_path, architecture, dtype="bfloat16", level=int(ALL))
    program = fxc.load(fxc.build(path, cache_dir=cache).hash, cache_dir=cache) if ALL else uncompiled(path)
    model = stock.stock(tmp_path, torch.bfloat16)
    ids, positions = torch.randint(3, 97, (40,)), torch.arange(40)
    with torch.no_grad():
        have = program.bind(model)(input_ids=ids, positions=positions).float()
        want = model(input_ids=ids[None], position_ids=positions[None]).logits[0].float()
        exact = model.float()(input_ids=ids[None], position_ids=positions[None]).logits[0]
    assert (have - exact).norm() < max(1.5 * (want - exact).norm(), 0.02 * exact.norm())


@pytest.mark.parametrize("architecture", PLANNED)
def test_depth_compiles_nothing_more(tmp_path: Path, architecture: str) -> None:
    """Equal layers are equal pieces, also where two kinds of them take turns."""
    four, six = (plan_of(stock.write(tmp_path, architecture, layers=layers)) for layers in (4, 6))
    assert six.pieces == four.pieces + 4
    assert {unit.key for unit in six.units} == {unit.key for unit in four.units}


def test_an_encoder_out_of_a_checkpoint_of_a_whole_model(tmp_path: Path) -> None:
    program = uncompiled(stock.write(tmp_path, "bert", level=0))
    whole = transformers.BertForMaskedLM(transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    whole.set_attn_implementation("eager")
    whole.save_pretrained(tmp_path)
    with pytest.raises(WeightError, match=r"cls.predictions.bias is not a weight of the program"):
        program.bind(tmp_path)
    assert max(stock.errors(program.bind(tmp_path, strict=False), whole.bert).values()) < 1e-5


def test_a_checkpoint_that_lacks_an_expert(tmp_path: Path) -> None:
    program = uncompiled(stock.write(tmp_path, "mixtral", level=0))
    stock.stock(tmp_path).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    part = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != part}, tmp_path / "model.safetensors")
    message = f"weight model.layers.1.mlp.experts.gate_up_proj comes in parts, of which {part} is missing"
    with pytest.raises(WeightError, match=message):
        program.bind(tmp_path)
    save_file({**tensors, part: tensors[part][:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=rf"weight {part} is float32\[47, 32\], unlike"):
        program.bind(tmp_path)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_rotary_embedding_is_found_by_its_pass(tmp_path: Path, architecture: str) -> None:
    """With the norm of heads where there is one; the pieces that have it compute what they did."""
    plan = plan_of(stock.write(tmp_path, architecture, level=2))
    assert {entry.name: entry.matches for entry in plan.manifest.passes}["norm_rope"] == 4
    fused = [unit for unit in plan.units if "fxc.norm_rope" in unit.text]
    assert len(fused) == 2
    for unit in fused:
        assert ("norm=True" in unit.text) == (architecture == "qwen3")
        given = inputs(unit.piece.text, {"num_tokens": 5})
        for have, want in zip(execute(unit.text, given), execute(unit.piece.text, given), strict=True):
            assert (have.dtype, strides(have)) == (want.dtype, strides(want))
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
