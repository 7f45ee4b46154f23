"""What a model's code depends on besides the files its classes stand in: modules it imports, environment variables
and small files that it reads while it is constructed and traced. A change of any of them is a reason to trace again."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

LARGEST = 1 << 20
"""Bytes from which on a file is data, as weights are, and no part of what a program is."""

_PACKAGES = tuple(str(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(eq=False)
class Reads:
    """What was read in a block of `recorded`."""

    directory: Path
    variables: set[str] = field(default_factory=set)
    """Of the environment, set or not."""
    paths: set[str] = field(default_factory=set)

    def files(self) -> set[Path]:
        """Those below the directory that are not code."""
        found = {Path(path).resolve() for path in self.paths if Path(path).suffix not in (".py", ".pyc")}
        return {file for file in found if file.is_relative_to(self.directory) and is_own(str(file)) and _is_small(file)}

    def state(self) -> dict[str, str | bytes | None]:
        """What all that was read is now."""
        variables = {name: os.environ.get(name) for name in self.variables}
        return variables | {str(file): file.read_bytes() for file in self.files()}


_recording: list[Reads] = []
_hooked: list[bool] = []
_plain_getitem = type(os.environ).__getitem__


@contextmanager
def recorded(directory: Path) -> Iterator[Reads]:
    """Record what is read inside the block; `directory` is that of model.yaml."""
    reads = Reads(directory)
    if not _hooked:
        sys.addaudithook(_audit)  # cannot be taken away again
        _hooked.append(True)
    _recording.append(reads)
    type(os.environ).__getitem__ = _getitem  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        _recording.remove(reads)
        if not _recording:
            type(os.environ).__getitem__ = _plain_getitem  # type: ignore[method-assign]


def note(earlier: Reads) -> None:
    """Have what was read earlier count as read now: of a module that is executed once only."""
    for reads in _recording:
        reads.variables |= earlier.variables
        reads.paths |= earlier.paths


def _getitem(environ: Any, name: Any) -> str:
    if isinstance(name, str) and is_own(_caller(sys._getframe(1))):
        for reads in _recording:
            reads.variables.add(name)
    return _plain_getitem(environ, name)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _recording and event == "open":
        path, _, flags = arguments
        if isinstance(path, str) and not flags & (os.O_WRONLY | os.O_RDWR):
            for reads in _recording:
                reads.paths.add(os.path.abspath(path))


def _caller(frame: FrameType | None) -> str:
    """The file that asks the environment, not the library functions in between."""
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


def is_own(file: str) -> bool:
    """Whether a file is the user's, and not of Python, an installed package or fxc."""
    installed = "site-packages" in file or "dist-packages" in file or file.startswith(_PACKAGES)
    return not installed and not file.startswith("<") and file not in _own_files()


def _own_files() -> set[str]:
    return {str(module.__file__) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "fxc"}


def _is_small(file: Path) -> bool:
    try:
        return file.is_file() and file.stat().st_size <= LARGEST
    except OSError:
        return False


def imported(files: Iterable[Path]) -> set[Path]:
    """The user's own modules that `files` import, and those that these import."""
    modules: dict[Path, ModuleType] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_own(file):
            modules[Path(file).resolve()] = module
    found: set[Path] = set()
    waiting = [file for file in files if file in modules]
    while waiting:
        file = waiting.pop()
        for name in _imports(file, modules[file]):
            target = Path(str(getattr(sys.modules.get(name), "__file__", None))).resolve()
            if target in modules and target not in found:
                found.add(target)
                waiting.append(target)
    return found


def _imports(file: Path, module: ModuleType) -> Iterator[str]:
    """Dotted names in the import statements of a file, with those of the packages that they lie in."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = (getattr(module, "__package__", None) or "").split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
