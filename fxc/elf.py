"""What a shared library asks of the machine that it is loaded on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_NEEDED = re.compile(r"Name: (GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)\b")


def needs(library: Path) -> dict[str, str]:
    """The newest version of each set of symbols that it uses, `{"GLIBC": "2.14", "GLIBCXX": "3.4.21"}`, as readelf
    lists them: of binutils, like the strip that a build wants. Nothing where there is none."""
    try:
        listed = subprocess.run(["readelf", "-V", "-W", library], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in _NEEDED.findall(listed):
        newest[name] = max(newest.get(name, ()), tuple(map(int, version.split("."))))
    return {name: ".".join(map(str, newest[name])) for name in sorted(newest)}
