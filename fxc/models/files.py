"""Import a Python file by its path, so that its neighbours can be imported and a traceback shows its lines."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

from fxc.imports import importable, module_name
from fxc.models import reads
from fxc.models.reads import Reads

_STARTED = time.time()
_loaded: dict[str, dict[Path, str]] = {}
"""By name of a module from `load_file`: digests of its file and of the neighbours that it imported."""
_reads: dict[str, tuple[Reads, dict[str, str | bytes | None]]] = {}
"""What else it read while it was executed, and what that was."""
_neighbours: set[str] = set()
"""Names under which files beside a loaded one are in sys.modules."""


def load_file(path: Path) -> ModuleType:
    """The module in `path`: executed once, and again only after the file or what it reads was edited."""
    path = path.resolve()
    if (known := _imported_otherwise(path)) is not None:
        return known
    name = module_name(path)
    found = sys.modules.get(name)
    if found is not None and name in _loaded and _digests(_loaded[name]) == _loaded[name]:
        read, state = _reads[name]
        if read.state() == state:
            reads.note(read)
            return found
    for neighbour in _neighbours:
        sys.modules.pop(neighbour, None)
    _neighbours.clear()
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[name] = module
    try:
        with importable(path.parent), reads.recorded(path.parent) as read:
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    files = {path: ""}
    for other in set(sys.modules) - before - {name}:
        file = getattr(sys.modules[other], "__file__", None)
        if file and Path(file).resolve().is_relative_to(path.parent) and "site-packages" not in file:
            _neighbours.add(other)
            files[Path(file).resolve()] = ""
    _loaded[name] = _digests(files)
    _reads[name] = (read, read.state())
    return module


def _imported_otherwise(path: Path) -> ModuleType | None:
    """The module if it was imported under a name of its own: run twice, it would register its ops twice. One edited
    since this process began is another."""
    if not path.is_file() or path.stat().st_mtime > _STARTED:
        return None
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in _loaded and name != "__main__" and file and Path(file) == path:
            return module
    return None


def _digests(files: dict[Path, str]) -> dict[Path, str]:
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "" for file in files}
