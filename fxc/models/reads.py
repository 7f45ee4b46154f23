"""What a model's code depends on besides the files its classes stand in: modules it imports, environment variables
and small files that it reads while it is constructed and traced. A change of any of them is a reason to trace again."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

LARGEST = 16 << 20
"""Bytes from which on a file is weights, which are bound to a program and are no part of it. A lookup digests all files
up to that, some 10 ms each; tables and tokenizers are smaller, a checkpoint of any use is larger."""

_SYSTEM = ("/proc/", "/sys/", "/dev/")
_PACKAGES = tuple(str(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(eq=False)
class Reads:
    """What was read in a block of `recorded`."""

    directory: Path
    variables: set[str] = field(default_factory=set)
    """Of the environment, set or not."""
    paths: dict[str, bool] = field(default_factory=dict)
    """Whether the user's code asked for the file, itself or through a library."""

    def files(self) -> set[Path]:
        """What the user's code opened, wherever it lies; and data below the directory, whoever opened it."""
        found: set[Path] = set()
        for path, asked in self.paths.items():
            if _is_installed(path):
                continue
            file = Path(path).parent.resolve() / Path(path).name  # a link itself may be made to lead elsewhere
            wanted = asked or (file.suffix != ".py" and file.is_relative_to(self.directory))
            if wanted and is_own(str(file)) and not str(file).startswith(_SYSTEM) and _is_small(file):
                found.add(file)
        return found

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
        _add(reads, earlier.paths)


def _getitem(environ: Any, name: Any) -> str:
    if isinstance(name, str) and is_own(_caller(sys._getframe(1))):
        for reads in _recording:
            reads.variables.add(name)
    return _plain_getitem(environ, name)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _recording and event == "open":
        path, _, flags = arguments
        if isinstance(path, (str, bytes, os.PathLike)) and not flags & (os.O_WRONLY | os.O_RDWR):
            opened = {_source(os.path.abspath(os.fsdecode(path))): _is_asked(sys._getframe().f_back)}
            for reads in _recording:
                _add(reads, opened)


def _add(reads: Reads, paths: dict[str, bool]) -> None:
    for path, asked in paths.items():
        reads.paths[path] = asked or reads.paths.get(path, False)


def _source(path: str) -> str:
    """The module's text instead of what Python keeps of it."""
    if not path.endswith(".pyc"):
        return path
    try:
        return importlib.util.source_from_cache(path)
    except ValueError:
        return path


def _is_asked(frame: FrameType | None) -> bool:
    """Whether the user's code opens a file; not fxc, nor what shows the lines of a traceback."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name == "linecache" or name.partition(".")[0] == "fxc":
            return False
        if not _is_installed(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _caller(frame: FrameType | None) -> str:
    """The file that asks the environment, not the library functions in between."""
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


def is_own(file: str) -> bool:
    """Whether a file is the user's, and not of Python, an installed package or fxc."""
    return not _is_installed(file) and file not in _own_files()


def _is_installed(file: str) -> bool:
    return file.startswith(("<", *_PACKAGES)) or "site-packages" in file or "dist-packages" in file


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
