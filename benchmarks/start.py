"""What `fxc --help` and `fxc --version` cost next to starting Python, and to importing what parses the command line.

    python benchmarks/start.py    writes results/start.json

CPU time of the process, user and system, so that other work on the machine counts little; taken in turns, the median of
21. The interpreter's own start includes `site`, which is slower where packages are installed for editing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROUNDS = 21
COMMANDS = {
    "python": ("-c", "pass"),
    "python, typer imported": ("-c", "import typer"),
    "fxc --help": ("-m", "fxc", "--help"),
    "fxc --version": ("-m", "fxc", "--version"),
}


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(took(arguments))
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "cpu_ms": {name: round(1e3 * value, 1) for name, value in medians.items()},
        "ratio_to_python": {name: round(value / medians["python"], 2) for name, value in medians.items()},
    }
    place = Path(__file__).parent / "results" / "start.json"
    place.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(place.read_text(encoding="utf-8"), end="")


def took(arguments: tuple[str, ...]) -> float:
    """Seconds of CPU time, from nothing to the end of the process."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
