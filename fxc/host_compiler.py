"""Compiles the C++ that Inductor writes, in a third of the time.

Most of what the host compiler does for a piece is the same for every piece: parsing torch's headers, and compiling
`interface.cpp`, the part of the binary that has the C entry points and calls the model through `AOTInductorModel`.
Both are done once per set of flags and kept: the headers as precompiled headers, the interface as an object file that
is linked to each piece. Measured with g++ 12 and torch 2.13, one core: 13 s for a piece without, 5 s with; making
them takes 15 s, so it is done only for builds of several binaries.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

Run = Callable[[str, str], None]
"""Runs a command line in a directory; raises when it fails."""

_MODEL = "#include <torch/csrc/inductor/aoti_runtime/model.h>\n"
_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


class HostCompiler:
    """Stands in for Inductor's function that runs the host compiler."""

    def __init__(self, run: Run, interface: str, scratch: Path, make: bool, identity: str, baseline: str = "") -> None:
        """
        Args:
            run: what it stands in for.
            interface: text of torch's interface.cpp.
            scratch: lasting directory for what is shared.
            make: whether to make what is missing there.
            identity: versions of torch and of the compiler, which flags do not show.
            baseline: `-march` to use instead of the builder's own CPU.
        """
        self.run = run
        self.interface = interface.strip()
        self.scratch = scratch
        self.make = make
        self.identity = identity
        self.baseline = baseline
        self.objects: dict[str, Path] = {}
        """Object of a piece -> object of the interface that it has to be linked with."""

    def __call__(self, cmd_line: str, cwd: str) -> None:
        arguments = [word for word in shlex.split(cmd_line) if word != "-g1"]  # line tables; stripped afterwards
        if self.baseline:
            arguments = [f"-march={self.baseline}" if word == "-march=native" else word for word in arguments]
        if "-c" in arguments and (source := _only(arguments, ".cpp")):
            arguments = self._compile(arguments, Path(source), cwd)
        elif "-shared" in arguments:
            found = [self.objects[argument] for argument in arguments if argument in self.objects]
            arguments[1:1] = map(str, found)
        self.run(shlex.join(arguments), cwd)

    def accepts(self, flags: list[str], code: str) -> bool:
        """Whether the compiler compiles `code` with `flags`; asked once and kept."""
        compiler = shlex.split(os.environ.get("CXX") or "g++")
        name = hashlib.sha256("\0".join([self.identity, *compiler, *flags, code]).encode()).hexdigest()[:32]
        answer = self.scratch / f"{name}.accepted"
        if not answer.exists():
            command = [*compiler, *flags, "-fsyntax-only", "-std=c++20", "-x", "c++", "-"]
            # The code may use torch's headers, for which the include path is missing here: what counts are the flags.
            source = code if "#include <immintrin.h>" in code else ""
            done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
            if done.returncode not in (0, 1):  # killed, say: no answer to keep
                return False
            part = answer.with_suffix(f".{os.getpid()}")
            part.write_text("yes" if done.returncode == 0 else "no")
            os.rename(part, answer)
        return answer.read_text() == "yes"

    def _compile(self, arguments: list[str], source: Path, directory: str) -> list[str]:
        """The command to use instead, after the source was changed to match."""
        text = source.read_text()
        if self.interface in text:
            device = text.partition(self.interface)[0]
            header = device + _MODEL
        elif _PREFIX in text:
            header = _PREFIX
        else:
            return arguments
        flags = _flags(arguments, str(source))
        precompiled = self._kept(flags, header, ".h.gch", directory)
        if precompiled is None:
            return arguments
        include = ["-include", str(precompiled.with_suffix(""))]
        if header is not _PREFIX:
            shared = self._kept([*flags, *include], device + self.interface, ".o", directory)
            if shared is not None:
                source.write_text(text.replace(self.interface, _MODEL, 1))
                self.objects[arguments[arguments.index("-o") + 1]] = shared
        return [arguments[0], *include, *arguments[1:]]

    def _kept(self, flags: list[str], text: str, suffix: str, directory: str) -> Path | None:
        """The file made of `text` with `flags`; None where it is not there and is not to be made here and now."""
        name = hashlib.sha256("\0".join([self.identity, *flags, text]).encode()).hexdigest()[:32]
        path = self.scratch / (name + suffix)
        if path.exists():
            return path
        if not self.make:
            return None
        with open(path.with_suffix(".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return None  # compiling without is quicker than waiting
            if not path.exists() and not self._produce(flags, text, path, directory):
                return None
        return path

    def _produce(self, flags: list[str], text: str, path: Path, directory: str) -> bool:
        """Make a file that pieces share; False where the compiler fails, which the piece itself then shows."""
        header = path.name.endswith(".h.gch")
        source = path.with_suffix("") if header else path.with_suffix(".cpp")
        source.write_text(text)
        part = path.with_suffix(".part")
        kind = ["-x", "c++-header", "-c"] if header else ["-c"]
        command = [*flags, *kind, str(source), "-o", str(part)]
        if subprocess.run(command, cwd=directory, check=False, capture_output=True).returncode:
            return False
        with open(part, "rb") as file:
            os.fsync(file.fileno())  # a half file under its final name would break every later build
        os.rename(part, path)
        return True


def _only(arguments: list[str], suffix: str) -> str | None:
    found = [argument for argument in arguments if argument.endswith(suffix)]
    return found[0] if len(found) == 1 else None


def _flags(arguments: list[str], source: str) -> list[str]:
    """The command without source, output and `-c`; its first word is the compiler."""
    at = arguments.index("-o")
    return [a for i, a in enumerate(arguments) if a not in (source, "-c") and i not in (at, at + 1)]
