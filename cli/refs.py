"""What a user may write for an artifact."""

from __future__ import annotations

from pathlib import Path

from fxc.cache import Artifact, Cache


def open_artifact(cache: Cache, ref: str) -> Artifact:
    """The artifact that `ref` names: a directory with manifest.json, or a prefix of a hash in the cache."""
    path = Path(ref)
    if "/" in ref or (path / "manifest.json").is_file():
        return Artifact.open(path)
    return cache.artifact(cache.resolve(ref))
