"""The two keys of a build, and the source files behind them. Imports no torch.

The direct key stands for a spec on a machine; with the digests of the source files that the last trace read, it finds
an artifact without tracing. The content key names the artifact: it digests what was traced and what it is compiled for.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from fxc import machine
from fxc.cache import Cache, key
from fxc.errors import FxcError
from fxc.manifest import Factor, Manifest, Source
from fxc.ranks import Ranks
from fxc.spec import Spec
from fxc.target import Target

MODULE = "module:"
VARIABLE = "env:"
COMPILER = "compiler:"


def direct_key(spec: Spec, target: Target, place: Ranks) -> str:
    """Digest of what a user can change without touching a source file. CUDA graph settings are left out: they
    compile nothing."""
    plain = msgspec.structs.replace(spec, cudagraph=type(spec.cudagraph)())
    target = msgspec.structs.replace(target, compiler="")  # is among the sources
    return key.combine(
        [
            ("fxc", fxc_version()),
            ("spec", msgspec.json.encode(plain, order="deterministic").decode()),
            ("target", msgspec.json.encode(target).decode()),
            ("python", platform.python_version()),
            ("transformers", _installed("transformers")),
            ("ranks", msgspec.json.encode(place).decode()),
        ]
    )


def content_key(factors: Sequence[Factor]) -> str:
    """The artifact's name."""
    return key.combine([(factor.name, factor.value) for factor in factors])


def find(spec: Spec, directory: Path, place: Ranks, cache: Cache) -> str | None:
    """The artifact for a spec whose sources are as they were when it was traced; None when it has to be traced."""
    target = machine.probe(spec.device, compiler=False)
    return cache.lookup(direct_key(spec, target, place), lambda source: digest_of(source, directory))


def remember(cache: Cache, direct: str, manifest: Manifest) -> None:
    """Have `find` find this artifact while its sources, and the compiler, are what they are now."""
    compiler = Source(file=COMPILER, digest=key.digest(manifest.target.compiler))
    cache.remember(direct, manifest.hash, (*manifest.sources, compiler))


def sources(files: Iterable[Path], variables: Iterable[str], directory: Path) -> tuple[Source, ...]:
    """Records of source files: relative to model.yaml's directory, or as modules where they are installed packages.
    And of environment variables."""
    names: dict[Path, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "site-packages" in file:
            names.setdefault(Path(file), MODULE + name)
    found = {}
    for file in files:
        name = names.get(file) or os.path.relpath(file, directory)
        digest = digest_of(Source(file=name, digest=""), directory)
        if digest is not None:
            found[name] = Source(file=name, digest=digest)
    for variable in variables:
        name = VARIABLE + variable
        found[name] = Source(file=name, digest=_digest_of_variable(variable))
    return tuple(found[name] for name in sorted(found))


def digest_of(source: Source, directory: Path) -> str | None:
    """The digest of a source file as it is now; None where there is no such file."""
    if source.file.startswith(VARIABLE):
        return _digest_of_variable(source.file.removeprefix(VARIABLE))
    if source.file == COMPILER:  # a machine that has none can still use what was compiled elsewhere
        compiler = machine.compiler_version()
        return key.digest(compiler) if compiler else source.digest
    path = _module_file(source.file.removeprefix(MODULE)) if source.file.startswith(MODULE) else directory / source.file
    try:
        return key.digest(path.read_bytes()) if path else None
    except OSError:
        return None


def _digest_of_variable(name: str) -> str:
    value = os.environ.get(name)
    return key.digest("" if value is None else f"={value}")


def _module_file(name: str) -> Path | None:
    """Where a module lies, found without importing its parents."""
    top, _, rest = name.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin)
    base = Path(spec.origin).parent.joinpath(*rest.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def fxc_version() -> str:
    return _installed("fxc")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def intact(cache: Cache, hash: str, place: Ranks, proved: bool) -> bool:
    """Whether the artifact is there with this rank, all files as they were written, and proved if it has to be."""
    try:
        artifact = cache.artifact(hash)
        rank_dir = artifact.rank_dir(place.rank, place.data_parallel_rank)
        artifact.verify(rank_dir)
    except FxcError:
        return False
    enough = artifact.manifest.proved or not proved
    return enough and artifact.manifest.ranks[rank_dir].world_size == place.world_size
