"""Paged attention in Hugging Face models: greedy tokens of a continuous batch equal transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.generate import Generator, Request
from fxc import machine
from fxc.plan import make_plan
from fxc.runtime import PagedCache, Program
from fxc.spec import load_spec
from tests.building import program_of
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
