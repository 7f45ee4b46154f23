"""What a manifest says that there is, with names that can be trusted to stay where they belong."""

from __future__ import annotations

import re

from fxc.cache.artifact import is_safe
from fxc.errors import DamagedError
from fxc.manifest import File, Manifest

HINT = "get it again from where it was built"


def listed(manifest: Manifest) -> dict[str, File]:
    """Every file of every rank, by name.

    Raises:
        DamagedError: a name leads out of its rank's directory, or is a file's and a folder's; or a binary's key is
            none.
    """
    if strange := next((key for key in manifest.binaries if not re.fullmatch(r"\w+", key)), ""):
        raise DamagedError(f"the manifest of {manifest.hash} has a binary {strange!r}", HINT)
    found: dict[str, File] = {}
    for rank_dir, rank in manifest.ranks.items():
        for name, entry in rank.files.items():
            good = re.fullmatch(r"rank_\d+_\d+", rank_dir) and is_safe(name) and name.startswith(f"{rank_dir}/")
            if not good:
                raise DamagedError(f"the manifest of {manifest.hash} lists {name!r} in {rank_dir!r}", HINT)
            found[name] = entry
    for name in found:
        if above := next((parent for parent in parents(name) if parent in found), ""):
            raise DamagedError(f"the manifest of {manifest.hash} lists {above!r} and {name!r} below it", HINT)
    return found


def parents(name: str) -> list[str]:
    """`a`, `a/b` of `a/b/c`."""
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
