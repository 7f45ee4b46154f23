"""Where results of benchmarks go: all numbers as JSON, the table as Markdown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def save(name: str, found: dict[str, Any], lines: Iterable[str]) -> None:
    """Write `<name>.json` and `<name>.md` into $BENCH_RESULTS, by default `results` beside this file."""
    results = Path(os.environ.get("BENCH_RESULTS", Path(__file__).parent / "results"))
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (results / f"{name}.md").write_text("\n".join([*lines, ""]))
