"""Files that nobody else can change, for what opens files by their names: the dynamic linker."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fxc.errors import RunError

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
LINKS = Path("/dev/shm")
"""Where the folder is made if it can be: there is one in containers whose root is read-only, too."""


@contextmanager
def files(contents: Mapping[str, bytes]) -> Iterator[Path]:
    """A folder with files of these names and contents, for as long as they are not open. The contents are in memory and
    sealed, the folder has links to them alone.

    Raises:
        RunError: this system has no such memory, or no folder for the links.
    """
    with ExitStack() as stack:
        try:
            place = LINKS if os.access(LINKS, os.W_OK) else None
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="fxc-", dir=place, ignore_cleanup_errors=True))
            )
            for name, data in contents.items():
                os.symlink(f"/proc/self/fd/{stack.enter_context(_sealed(name, data))}", folder / name)
        except OSError as error:
            raise RunError(
                f"signed binaries cannot be kept where nobody can change them: {error.strerror}",
                "they need memfd_create(2), /proc and a folder to write in: /dev/shm or TMPDIR",
            ) from None
        yield folder


@contextmanager
def _sealed(name: str, data: bytes) -> Iterator[int]:
    """A file of the process's own with these contents, which cannot change any more."""
    number = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, SEALS)
        yield number
    finally:
        os.close(number)
