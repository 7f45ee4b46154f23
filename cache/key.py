"""Keys and digests: xxhash names things, sha256 guards the bytes of files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path


def digest(data: bytes | str) -> str:
    """Name of some text or bytes: 32 hex digits of XXH3."""
    import xxhash  # here, since loading needs none

    return xxhash.xxh3_128_hexdigest(_bytes(data))


def combine(factors: Sequence[tuple[str, str]]) -> str:
    """Digest of ordered, named factors. Lengths go in too, so that no two lists read as the same text."""
    import xxhash

    state = xxhash.xxh3_128()
    for part in (part for factor in factors for part in factor):
        data = _bytes(part)
        state.update(b"%d:" % len(data))
        state.update(data)
    return state.hexdigest()


def sha256(data: bytes | memoryview) -> str:
    """64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes(data: bytes | str) -> bytes:
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
