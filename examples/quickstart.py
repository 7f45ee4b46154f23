"""Loads a built tiny_llama in this process, runs it at several sizes and compares with eager: quickstart.py HASH."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from tiny_llama import TinyLlama

import fxc


def seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    start = time.perf_counter()
    program = fxc.load(sys.argv[1])
    loaded = time.perf_counter()
    print(f"load        {(loaded - start) * 1e3:8.2f} ms")

    torch.manual_seed(0)
    model = TinyLlama(**program.manifest.spec.model.args).eval()
    start = time.perf_counter()
    program.bind(model)
    print(f"bind        {(time.perf_counter() - start) * 1e3:8.2f} ms")

    print("tokens   first call   per call      eager   largest difference   served by")
    for count in (1, 8, 64, 37, 500):
        ids, positions = torch.randint(1024, (count,)), torch.arange(count)
        start = time.perf_counter()
        logits = program(input_ids=ids, positions=positions)
        first = time.perf_counter() - start
        expected = model(ids, positions)
        assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-4), f"{count} tokens: not what eager gives"
        difference = (logits - expected).abs().max().item()
        ours = seconds(partial(program, input_ids=ids, positions=positions))
        eager = seconds(partial(model, ids, positions))
        served = "its own program" if count in program.sizes else "the general program"
        times = f"{first * 1e3:9.2f} ms {ours * 1e3:7.2f} ms {eager * 1e3:7.2f} ms"
        print(f"{count:6} {times} {difference:20.1e}   {served}")

    from fxc.runtime import compilers_imported  # here: what it imports is part of the time of loading

    print("compilers imported:", ", ".join(compilers_imported()) or "none")


if __name__ == "__main__":
    main()
