"""Folders as they are downloaded, stock models to compare with, and the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fxc.runtime.program import Program
from tests.models import configs

ARCHITECTURES = [name for name in (*configs.CAUSAL, *configs.ENCODER) if name != "llama4_text"]
TOKENS = (1, 2, 5, 13, 40)
BATCHES = {1: 1, 2: 2, 5: 1, 13: 3, 40: 2}
"""Tokens -> sequences of an encoder's batch."""


def write(folder: Path, architecture: str, dtype: str = "float32", level: int = 1, layers: int | None = None) -> Path:
    """config.json and model.yaml; returns the path of the latter."""
    data = configs.config(architecture)
    if layers is not None:
        data |= {"n_layers" if architecture == "distilbert" else "num_hidden_layers": layers}
    if "layer_types" in data and layers is not None:
        data["layer_types"] = configs.SLIDING * (layers // 2)
    if architecture == "distilbert":
        data.pop("num_hidden_layers")  # means the same and would win
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    path = folder / "model.yaml"
    path.write_text(f"model: {{huggingface: ., dtype: {dtype}}}\ndevice: cpu\ncompile: {{level: {level}}}\n")
    return path


def stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The class as transformers has it, with eager attention and random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    cls: Any = getattr(transformers, (config.architectures or [""])[0])
    made = cls._from_config(config, attn_implementation="eager", experts_implementation="eager", dtype=dtype)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.2) if parameter.ndim > 1 else parameter.data.uniform_(0.5, 1.5)
    return made.eval()


def errors(program: Program, model: Any) -> dict[int, float]:
    """Tokens -> largest difference between the two, relative to the largest value."""
    torch.manual_seed(1)
    with torch.no_grad():
        return {count: _error(program, model, count) for count in TOKENS}


def _error(program: Program, model: Any, count: int) -> float:
    if program.manifest.inputs[1].name == "positions":
        ids, positions = torch.randint(3, 97, (count,)), torch.arange(count)
        want: Tensor = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        have: Tensor = program(input_ids=ids, positions=positions)
    else:
        ids = torch.randint(3, 97, (BATCHES[count], count))
        mask = torch.ones_like(ids)
        mask[0, 2:] = torch.arange(count)[2:] % 3 > 0
        want = model(input_ids=ids, attention_mask=mask).last_hidden_state
        have = program(input_ids=ids, attention_mask=mask)
    assert (have.shape, have.dtype) == (want.shape, want.dtype)
    assert want.isfinite().all()
    return ((have - want).abs().max() / want.abs().max()).item()
