"""What a shared library asks of the machine that it is loaded on."""

from __future__ import annotations

import re
from pathlib import Path

_VERSIONED = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)(?=\0)")


def needs(library: Path) -> dict[str, str]:
    """The newest version of each set of symbols that it uses, `{"GLIBC": "2.14", "GLIBCXX": "3.4.21"}`.

    Read from the names in its string table: a library that exports no versioned symbols of its own lists there what
    it needs of others.
    """
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in _VERSIONED.findall(library.read_bytes()):
        numbers = tuple(map(int, version.split(b".")))
        newest[name.decode()] = max(newest.get(name.decode(), ()), numbers)
    return {name: ".".join(map(str, newest[name])) for name in sorted(newest)}
