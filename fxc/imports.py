"""Python files of users that are executed by path, in a build and in a server: under which name, and what they find."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def module_name(path: Path) -> str:
    """A name that depends on the file's own name, and on its folder only when two files of one name are loaded."""
    stem = re.sub(r"\W", "_", path.stem)
    name = f"_fxc_target_{stem}"
    number = 1
    while name in sys.modules and Path(str(sys.modules[name].__file__)) != path:
        number += 1
        name = f"_fxc_target_{stem}_{number}"
    return name


@contextmanager
def importable(directory: Path) -> Iterator[None]:
    """`directory` comes first on sys.path inside the block."""
    entry = str(directory)
    importlib.invalidate_caches()
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)
