"""Continuous batching on a loaded program: admit, prefill in chunks, decode, evict.

    python examples/generate.py MODEL.YAML|HASH [--weights FOLDER] [--prompt 1,2,3 ...] [--new 16] [--blocks 512]

Prompts and answers are token ids: a tokenizer is the server's own business.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

import fxc
from fxc.ready import make_weight
from fxc.runtime import CacheFullError, PagedCache, Program
from fxc.runtime import Sequence as Cached


@dataclass(eq=False)
class Request:
    """A prompt, and what was generated of it so far."""

    prompt: list[int]
    new: int
    """How many tokens are wanted."""
    answer: list[int] = field(default_factory=list)
    cached: Cached = field(default_factory=Cached)

    @property
    def rest(self) -> list[int]:
        """Tokens whose keys and values are not in the cache: a prompt, or one token."""
        return (self.prompt + self.answer)[self.cached.length :]

    @property
    def done(self) -> bool:
        return len(self.answer) >= self.new


class Generator:
    """Greedy decoding of many requests at once."""

    def __init__(self, program: Program, cache: PagedCache, tokens: int, requests: int) -> None:
        """
        Args:
            tokens: the most that one step computes; longer prompts are prefilled in chunks.
            requests: the most that run at the same time.
        """
        self.program, self.cache = program, cache
        self.tokens, self.requests = tokens, requests
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = self.evictions = 0

    def run(self, requests: Iterable[Request]) -> None:
        """Generate until all are done."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """One call of the program: a token for each request that decodes, and as much of prompts as fits."""
        while self.waiting and len(self.running) < self.requests:
            self.running.append(self.waiting.popleft())
        chosen = self._choose()
        while True:
            try:
                inputs = self.cache.batch([(request.cached, ids) for request, ids in chosen])
                break
            except CacheFullError:
                self._evict()
                chosen = self._choose()
        logits = self.program(**inputs)
        last = logits[(inputs["query_starts"][1:] - 1).long()].argmax(-1).tolist()
        for (request, _), token in zip(chosen, last, strict=True):
            if not request.rest:  # the whole prompt is in the cache: the last row tells the next token
                request.answer.append(token)
            if request.done:
                self.cache.free(request.cached)
                self.running.remove(request)
        self.steps += 1

    def _choose(self) -> list[tuple[Request, Sequence[int]]]:
        """Who takes part in the next step with which tokens; those that decode come first."""
        left = self.tokens
        chosen: list[tuple[Request, Sequence[int]]] = []
        for request in sorted(self.running, key=lambda request: len(request.rest)):
            ids = request.rest[:left]
            if ids:
                chosen.append((request, ids))
                left -= len(ids)
        return chosen

    def _evict(self) -> None:
        """Take the youngest request's blocks; it begins again when there is room, with the tokens that it has."""
        if len(self.running) < 2:
            raise SystemExit("the cache is too small for a single request: give it more blocks")
        request = self.running.pop()
        self.cache.free(request.cached)
        self.waiting.appendleft(request)
        self.evictions += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", help="model.yaml, hash or path of a program built with kv_cache")
    parser.add_argument("--weights", help="safetensors file or folder; random weights when absent")
    parser.add_argument("--prompt", action="append", help="token ids, comma-separated; may be given several times")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate for each prompt")
    parser.add_argument("--blocks", type=int, default=512, help="blocks of the cache")
    options = parser.parse_args()
    program = fxc.load(options.ref)
    generator = torch.Generator(program.device).manual_seed(0)
    program.bind(options.weights or {w.name: make_weight(w, generator) for w in program.manifest.weights})
    cache = PagedCache(program, options.blocks)
    prompts = [[int(token) for token in text.split(",")] for text in options.prompt or ["1,2,3", "4,5,6,7,8,9,10"]]
    requests = [Request(prompt, options.new) for prompt in prompts]
    bounds = program.manifest.spec.dims
    with torch.no_grad():
        Generator(program, cache, bounds["num_tokens"].max, bounds["num_requests"].max).run(requests)
    for request in requests:
        print(",".join(map(str, request.prompt)), "->", ",".join(map(str, request.answer)))


if __name__ == "__main__":
    main()
