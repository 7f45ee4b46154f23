"""A benchmark of decoding with paged caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fxc
from fxc.bench import bench
from tests.huggingface import stock

PAGED = """
kv_cache: {block_size: 4, max_tokens: 64}
dims: {num_tokens: {min: 1, max: 8}, num_requests: {min: 1, max: 3}}
compile: {level: 0, sizes: [1, 3, 8]}
"""


@pytest.mark.parametrize("architecture", ["llama"])
def test_decode_batches(tmp_path: Path, architecture: str) -> None:
    """8 is no size: there are at most 3 requests. 2 is, as one between."""
    path = stock.write(tmp_path, architecture, level=0, layers=2)
    text = path.read_text()
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("compile:")) + PAGED)
    built = fxc.build(path, cache_dir=tmp_path / "cache", prove=False)
    found = bench(path, cache_dir=tmp_path / "cache", repeats=1)
    assert (found.hash, found.context) == (built.hash, 63)
    assert [size.size for size in found.sizes] == [{"num_tokens": n, "num_requests": n} for n in (1, 2, 3)]
    manifest = fxc.load(built.path).manifest
    caches = [entry for entry in manifest.inputs if entry.bound]
    per_token = sum(4 * torch.Size(map(int, entry.shape[2:])).numel() for entry in caches)
    assert found.cache == 3 * 64 * per_token
    (table,) = (weight for weight in manifest.weights if "embed_tokens" in weight.name)
    rows, width = map(int, table.shape)
    tied = not any("lm_head" in weight.name for weight in manifest.weights)
    for size in found.sizes:
        assert size.errors["compiled"] == 0
        assert size.errors["eager"] < 1e-6  # type: ignore[operator]
        looked_up = 4 * width * (rows if tied else size.tokens)
        assert size.bytes_read == found.weights - 4 * rows * width + looked_up + size.tokens * 64 * per_token
