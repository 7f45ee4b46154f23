"""Paged attention in Hugging Face models: greedy tokens of a continuous batch equal transformers' own `generate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from generate import Generator, Request

import fxc
from fxc import machine
from fxc.errors import SpecError
from fxc.plan import make_plan
from fxc.runtime import PagedCache, Program
from fxc.spec import load_spec
from tests.building import program_of
from tests.conftest import ROOT
from tests.huggingface import stock

PROMPTS = [[5, 17, 3], [11], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [50, 51, 52, 53, 54, 55, 56]]
NEW = 12
PAGED = """
kv_cache: {block_size: 4, max_tokens: 64}
dims: {num_tokens: {min: 1, max: 8}, num_requests: {min: 1, max: 3}}
"""


def paged(folder: Path, architecture: str) -> Program:
    path = stock.write(folder, architecture, level=0)
    path.write_text(path.read_text() + PAGED)
    return program_of(make_plan(load_spec(path), folder, machine.probe("cpu")))


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe"])
@torch.no_grad()
def test_greedy_tokens(tmp_path: Path, architecture: str) -> None:
    """Ragged prompts, longer than a step takes and than windows, in a cache that cannot hold all of them at once."""
    program = paged(tmp_path, architecture)
    model = stock.stock(tmp_path)
    cache = PagedCache(program.bind(model), 11)
    requests = [Request(prompt, NEW) for prompt in PROMPTS]
    generator = Generator(program, cache, tokens=8, requests=3)
    generator.run(requests)
    assert [request.answer for request in requests] == [greedy(model, prompt) for prompt in PROMPTS]
    assert generator.evictions > 0
    assert cache.free_blocks == 11


def test_the_example_as_a_program(tmp_path: Path) -> None:
    """Built, loaded by its path, with the weights of a checkpoint."""
    path = stock.write(tmp_path, "llama", level=0)
    path.write_text(path.read_text() + PAGED)
    model = stock.stock(tmp_path)
    model.save_pretrained(tmp_path)
    built = fxc.build(path, cache_dir=tmp_path / "cache")
    command = [sys.executable, "examples/generate.py", built.path, "--weights", str(tmp_path), "--blocks", "16"]
    command += [
        "--new",
        str(NEW),
        *(word for prompt in PROMPTS[:2] for word in ("--prompt", ",".join(map(str, prompt)))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    answers = [line.partition(" -> ")[2] for line in done.stdout.splitlines()]
    assert answers == [",".join(map(str, greedy(model, prompt))) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("inputs: {input_ids: {shape: [8], dtype: int64}}", "inputs: those of a model with kv_cache follow"),
        ("dims: {tokens: {min: 1, max: 2}}", "dims.tokens: no input has this dimension"),
    ],
)
def test_what_kv_cache_does_not_go_with(tmp_path: Path, change: str, message: str) -> None:
    path = stock.write(tmp_path, "llama", level=0)
    path.write_text(path.read_text() + f"kv_cache: {{block_size: 4}}\n{change}\n")
    with pytest.raises(SpecError, match=message):
        make_plan(load_spec(path), tmp_path, machine.probe("cpu"))


def test_encoders_keep_nothing(tmp_path: Path) -> None:
    path = stock.write(tmp_path, "bert", level=0)
    path.write_text(path.read_text() + "kv_cache: {block_size: 4}\n")
    with pytest.raises(SpecError, match=r"kv_cache: .*config.json is an encoder, which keeps no keys and values"):
        make_plan(load_spec(path), tmp_path, machine.probe("cpu"))
