"""Whether an artifact may be run: it is code, and whoever can write it runs what he likes in a server.

Without signatures, that rests on the file system, as it does for the programs on a PATH: everything on the way to an
artifact, and in it, belongs to this user or to root, and nobody else may write there. A folder that all may write and
that has the sticky bit, /tmp, is good enough above a folder of ours: others cannot rename or remove what is not theirs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fxc.cache import signing
from fxc.cache.artifact import MEND, Artifact
from fxc.cache.files import io_errors
from fxc.cache.layout import INDUCTOR, MANIFEST, SIGNATURE, Layout
from fxc.cache.listing import listed, parents
from fxc.convert import suggest
from fxc.errors import DamagedError, FxcError, UntrustedError, UsageError

WORDS = ("owner", "signed", "any")
ANY = "where nobody else can reach that, FXC_TRUST=any takes it as it is"
REPLACED = 10
"""How often an artifact may be replaced while it is looked at."""
LINKS = 40
"""Symbolic links on the way to an artifact; the kernel allows as many."""


class Trust(msgspec.Struct, frozen=True):
    """What is asked of an artifact before it is used."""

    owner: bool = True
    """Nobody but this user and root owns or may write it."""
    keys: tuple[Path, ...] = ()
    """Files of public keys; it is signed with one of them, if there are any here."""

    @classmethod
    def of(cls, environ: Mapping[str, str], verify_key: Path | None = None) -> Trust:
        """What FXC_TRUST (`owner`, `signed` or `any`) and FXC_VERIFY_KEY ask for; a `verify_key` asks for signatures.

        Raises:
            UsageError: another word, or signatures without a key.
        """
        word = environ.get("FXC_TRUST") or "owner"
        if word not in WORDS:
            raise UsageError(f"FXC_TRUST is {word!r}, expected owner, signed or any", suggest(word, WORDS, "words"))
        named = [str(verify_key)] if verify_key else environ.get("FXC_VERIFY_KEY", "").split(":")
        keys = tuple(Path(name) for name in named if name)
        if word == "signed" and not keys:
            raise UsageError(
                "FXC_TRUST=signed, and no key to check signatures with", "give --verify-key FILE or set FXC_VERIFY_KEY"
            )
        return cls(owner=word != "any", keys=keys if verify_key or word == "signed" else ())

    def check(self, artifact: Artifact) -> Artifact:
        """As `check`."""
        return check(artifact, self)

    @classmethod
    def unsigned(cls, environ: Mapping[str, str]) -> Trust:
        """The same without signatures: for what is about to be signed, or built again if it is not good."""
        return cls(owner=environ.get("FXC_TRUST") != "any")


def check(artifact: Artifact, trust: Trust) -> Artifact:
    """The artifact, or what has taken its place meanwhile.

    Raises:
        UntrustedError: others could have written it, it holds what its manifest does not list, or it is not signed.
        DamagedError: its manifest lists what cannot be.
        CacheMissError: it was removed meanwhile.
    """
    if trust.owner:
        check_place(artifact.path)
    missing = os.fspath(artifact.path)
    for _ in range(REPLACED):
        try:
            _check_tree(artifact, trust)
            if trust.keys:
                signing.verify(artifact.data, artifact.signature, trust.keys, artifact.path)
            return msgspec.structs.replace(artifact, trust=trust)
        except UntrustedError as error:
            try:
                now = Artifact.open(artifact.path)
            except FxcError:
                raise error from None
            if (now.data, now.signature) == (artifact.data, artifact.signature):
                raise
        except _GoneError as error:
            missing = str(error)
            now = Artifact.open(artifact.path)
        artifact = now
    raise DamagedError(f"{missing} is missing", MEND)


def check_cache(layout: Layout, trust: Trust) -> None:
    """The same for a cache directory, as far as it is there.

    Raises:
        UntrustedError: others own or may write it, or a folder above it.
    """
    if trust.owner:
        for path in (layout.root, layout.artifacts, layout.binaries, layout.index, layout.tuning):
            check_place(path)


def check_place(path: Path) -> None:
    """Every folder and link that is passed on the way to `path`, and itself; what is not there yet is as good as what
    it would lie in."""
    for place, status in _passed(path):
        _check_owner(place, status)
        shared = status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode)
        if not stat.S_ISLNK(status.st_mode) and not shared:
            _check_mode(place, status)


def _passed(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    current = Path("/")
    waiting = [*Path(os.path.abspath(path)).parts[1:]]
    links = 0
    with io_errors("read", path):
        yield current, os.lstat(current)
        while waiting:
            name = waiting.pop(0)
            current = current.parent if name == ".." else current / name
            try:
                status = os.lstat(current)
            except (FileNotFoundError, NotADirectoryError):
                return
            yield current, status
            if stat.S_ISLNK(status.st_mode) and links < LINKS:
                links += 1
                target = Path(os.readlink(current))
                waiting[:0] = target.parts[1:] if target.is_absolute() else target.parts
                current = Path("/") if target.is_absolute() else current.parent


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(
            f"{path} is not trusted: user {status.st_uid} owns it, expected {os.geteuid()} or root",
            f"change its owner; {ANY}",
        )


def _check_mode(path: Path, status: os.stat_result) -> None:
    """Others may not write. A group with the number of the user is that user's own."""
    by_group = status.st_mode & stat.S_IWGRP and status.st_gid != status.st_uid
    if by_group or status.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(status.st_mode)
        raise UntrustedError(
            f"{path} is not trusted: others may write it, its mode is {mode:04o}", f"chmod go-w {path}; {ANY}"
        )


def _check_tree(artifact: Artifact, trust: Trust) -> None:
    """What lies there is what the manifest lists: a file that nobody has checked could be used beside one that was."""
    files = {*listed(artifact.manifest), MANIFEST, SIGNATURE}
    ranks = artifact.manifest.ranks
    folders = {*ranks, *(f"{rank}/{INDUCTOR}" for rank in ranks), *(above for name in files for above in parents(name))}
    inside = os.path.realpath(artifact.path)
    with io_errors("read", artifact.path), _gone():
        for name, status in _walk(artifact.path):
            path = artifact.path / name
            if stat.S_ISLNK(status.st_mode):
                real = os.path.realpath(path)
                if not real.startswith(f"{inside}/"):
                    raise UntrustedError(
                        f"{path} is not trusted: it is a link out of the artifact to {real}", "remove it"
                    )
                status = os.stat(path)
            if name not in (folders if stat.S_ISDIR(status.st_mode) else files):
                raise UntrustedError(f"{path} is not trusted: its manifest does not list it", "remove it")
            if trust.owner:
                _check_owner(path, status)
                _check_mode(path, status)


class _GoneError(Exception):
    """What was listed is not there when it is looked at."""


@contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _GoneError(error.filename) from None


def _walk(top: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every entry below a folder, by name relative to it; links are not followed."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(top / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                status = entry.stat(follow_symlinks=False)
                yield name, status
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(name)
