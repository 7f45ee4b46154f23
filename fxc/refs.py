"""What a user may write for an artifact: a hash, its path, or the model.yaml that it was built from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fxc.cache import Artifact, Cache, Trust
from fxc.cache.layout import MANIFEST
from fxc.cache.trust import check
from fxc.errors import CacheMissError, UsageError
from fxc.ranks import ranks
from fxc.spec import load_spec


def is_spec(ref: str | Path) -> bool:
    """Whether `ref` names a model.yaml, rather than an artifact."""
    return Path(ref).suffix in (".yaml", ".yml") or Path(ref).is_file()


def find(
    ref: str | Path, cache_dir: Path | None, *, overrides: Iterable[str] = (), level: int | None = None,
    rank: int | None = None, world_size: int | None = None, dp_rank: int | None = None, use: bool = False,
    trust: Trust | None = None,
) -> Artifact:  # fmt: skip
    """The artifact that `ref` names: a prefix of a hash in the cache, the path of an artifact anywhere, or the path of
    the model.yaml that it was built from, exactly as it and the sources are now.

    Args:
        overrides: with `level` and the ranks, what a model.yaml was built with.
        use: note in the cache that it is used now.
        trust: what is asked of it; by default what FXC_TRUST and FXC_VERIFY_KEY say.

    Raises:
        CacheMissError: there is none.
        DamagedError: its manifest is damaged.
        UntrustedError: others could have written it, or it is not signed.
        SpecError: something is wrong with the model.yaml.
        UsageError: `ref` can name nothing, or a built artifact and `overrides` or `level` came.
    """
    if not isinstance(ref, (str, os.PathLike)):
        raise UsageError(
            f"{ref!r} is {type(ref).__name__}, expected the prefix of a hash, or the path of an artifact or model.yaml"
        )
    path = Path(ref)
    trust = trust or Trust.of(os.environ)
    if not is_spec(ref):
        if [*overrides] or level is not None:
            raise UsageError(f"{ref} is built already: --set and -O cannot change it", "name a model.yaml instead")
        if isinstance(ref, Path) or "/" in ref or (path / MANIFEST).is_file():
            return check(Artifact.open(path), trust)
    cache = Cache.open(cache_dir)
    if is_spec(ref):
        from fxc import identity  # takes longer than loading: only where it is needed

        place = ranks(rank, world_size, dp_rank)
        name = identity.find(load_spec(path, overrides, level), path.resolve().parent, place, cache)
        if name is None:
            hint = f"run `fxc build {path}`, or name a build with options by its hash; `fxc why {path}` tells more"
            raise CacheMissError(f"{path} is not built, or was changed since", hint)
    else:
        name = cache.resolve(str(ref))
    artifact = check(cache.artifact(name), trust)
    if use:
        cache.touch(name)
    return artifact
