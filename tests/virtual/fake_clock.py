"""Does the tune job on its stdin for a GPU that is not here, by a clock that likes small blocks and few warps."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import msgspec
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fxc import piece_jobs
from fxc.jobs import TuneJob


def took(config: Any) -> float:
    """Milliseconds."""
    blocks = sum(abs(math.log2(size) - 5) for size in config.kwargs.values())
    return float(1 + blocks + abs(math.log2(config.num_warps) - 1))


def main() -> None:
    CachingAutotuner.bench = lambda self, launcher, *args, **options: took(launcher.config)  # type: ignore[method-assign]
    out = os.dup(1)
    os.dup2(2, 1)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=TuneJob)
    os.write(out, msgspec.json.encode(piece_jobs.tune_piece(job)))
    os._exit(0)


main()
