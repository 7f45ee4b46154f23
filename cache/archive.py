"""One file for one artifact: a tar that holds its directory, `<hash>/manifest.json` first.

The same artifact gives the same bytes: names are sorted, times and owners are zero, and files with equal digests are
links to the first of them, whatever the file system knew of that. It can be unpacked into the `artifacts/` of a cache,
and is made for layers of images: anybody may read what that unpacks.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fxc.cache.artifact import Artifact, check_format, is_safe
from fxc.cache.binaries import measure
from fxc.cache.files import io_errors, link_file, make_dirs, write_chunks
from fxc.cache.layout import MANIFEST, SIGNATURE, is_hash
from fxc.cache.listing import HINT, listed, parents
from fxc.errors import DamagedError, FxcError, UsageError
from fxc.manifest import File, Manifest, decode

MOST = 1 << 28
"""Bytes of a manifest that are read, before anything of it was checked: 256 MiB."""


def export(artifact: Artifact, file: Path) -> File:
    """Write the archive, in one step; its size and digest.

    Raises:
        UsageError: it would replace what is no file, such as a device.
        DamagedError: a file of the artifact is.
        CacheIOError: the archive cannot be written.
    """
    file = file.resolve()  # a link stays one
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is not a regular file", "name a file that is to be written")
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with io_errors("write", file), open(part, "wb") as out:
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _fill(tar, artifact)
            out.flush()
            os.fsync(out.fileno())
        with io_errors("write", file):
            os.replace(part, file)
            return measure(file)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _fill(tar: tarfile.TarFile, artifact: Artifact) -> None:
    top = artifact.manifest.hash
    _add(tar, f"{top}/{MANIFEST}", artifact.data)
    if artifact.signature:
        _add(tar, f"{top}/{SIGNATURE}", artifact.signature)
    first: dict[File, str] = {}
    for name, entry in sorted(listed(artifact.manifest).items()):
        if entry in first:
            link = _info(f"{top}/{name}")
            link.type, link.linkname = tarfile.LNKTYPE, first[entry]
            tar.addfile(link)
        else:
            first[entry] = f"{top}/{name}"
            _add(tar, first[entry], artifact.read(name))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = _info(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _info(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    return info


def unpack(file: Path, stage: Path) -> Artifact:
    """Unpack into the directory `stage`, and check every name, link, size and digest.

    Raises:
        DamagedError: it is no archive of an artifact, or was altered.
        IncompatibleError: another version of fxc made it.
    """
    if not file.is_file():
        raise UsageError(f"{file} is not a file", "`fxc export` writes one")
    with _opened(file) as tar:
        members = _members(tar, file)
        manifest, data = _manifest(tar, members, file)
        new = stage / manifest.hash
        expected = listed(manifest)
        allowed = {*expected, MANIFEST, SIGNATURE, *(parent for name in expected for parent in parents(name)), ""}
        inner = {name.removeprefix(manifest.hash).removeprefix("/"): member for name, member in members.items()}
        if strange := next((name for name in inner if name not in allowed), None):
            raise DamagedError(f"{file} holds {strange!r}, which its manifest does not list", HINT)
        with io_errors("write", new):
            make_dirs(new)
            _extract(tar, {name: inner[name] for name in inner if name in expected}, expected, new, file)
        signature = _small(tar, inner[SIGNATURE]) if SIGNATURE in inner else b""
    return Artifact(new, manifest, data, signature)


@contextmanager
def _opened(file: Path) -> Iterator[tarfile.TarFile]:
    """Whatever is wrong with a tar file is one error."""
    try:
        with io_errors("read", file), open(file, "rb") as data, tarfile.open(fileobj=data, mode="r:") as tar:
            yield tar
    except FxcError:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise DamagedError(f"{file} is no archive of an artifact: {str(error) or 'it is cut off'}", HINT) from None


def _members(tar: tarfile.TarFile, file: Path) -> dict[str, tarfile.TarInfo]:
    """By name. All of one folder, each once, and nothing but files, links to files, and folders."""
    found: dict[str, tarfile.TarInfo] = {}
    for member in tar.getmembers():
        name = member.name
        if not is_safe(name) or name in found:
            raise DamagedError(f"{file} holds {name!r}{', twice' if name in found else ''}", HINT)
        plain = (member.isreg() and not member.issparse()) or member.islnk() or member.isdir()
        if not plain:
            raise DamagedError(f"{file} holds {name!r}, which is neither a file nor a folder", HINT)
        found[name] = member
    tops = {name.partition("/")[0] for name in found}
    if len(tops) != 1:
        raise DamagedError(f"{file} holds {len(tops)} folders, expected one artifact", HINT)
    return found


def _manifest(tar: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo], file: Path) -> tuple[Manifest, bytes]:
    (top,) = {name.partition("/")[0] for name in members}
    member = members.get(f"{top}/{MANIFEST}")
    if member is None:
        raise DamagedError(f"{file} holds no {MANIFEST}", HINT)
    data = _small(tar, member)
    where = f"{file}: {MANIFEST}"
    check_format(data, Path(where))
    manifest = decode(data, where)
    if manifest.hash != top or not is_hash(top):
        raise DamagedError(f"{file} holds {top!r}, and its manifest is of {manifest.hash!r}", HINT)
    return manifest, data


def _small(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if not member.isreg() or member.size > MOST:
        raise DamagedError(f"{member.name} is no file of {MOST >> 20} MiB or less", HINT)
    return _content(tar, member).read()


def _extract(
    tar: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo], expected: Mapping[str, File], new: Path, file: Path
) -> None:
    top = new.name
    for name, member in members.items():
        if member.isreg():
            make_dirs((new / name).parent)
            _extract_file(tar, member, expected[name], new / name, file)
    for name, entry in expected.items():
        member_or_none = members.get(name)
        if member_or_none is None or member_or_none.isdir():
            raise DamagedError(f"{file} lacks {name}", HINT)
        if member_or_none.islnk():
            target = member_or_none.linkname.removeprefix(f"{top}/")
            if target not in members or not members[target].isreg() or expected[target] != entry:
                raise DamagedError(f"{file}: {name} is a link to {member_or_none.linkname!r}, not the same file", HINT)
            make_dirs((new / name).parent)
            link_file(new / target, new / name)


def _extract_file(tar: tarfile.TarFile, member: tarfile.TarInfo, expected: File, path: Path, file: Path) -> None:
    if member.size != expected.bytes:
        raise DamagedError(f"{file}: {member.name} has {member.size} bytes, expected {expected.bytes}", HINT)
    digest = hashlib.sha256()
    write_chunks(path, _hashed(_content(tar, member), digest))
    if path.stat().st_size != expected.bytes or digest.hexdigest() != expected.sha256:
        raise DamagedError(f"{file}: {member.name} is damaged: its sha256 is not {expected.sha256}", HINT)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(member)
    if content is None:
        raise tarfile.ReadError(f"{member.name} has no content")
    return content


def _hashed(content: IO[bytes], digest: Any) -> Iterable[bytes]:
    while chunk := content.read(1 << 20):
        digest.update(chunk)
        yield chunk
