"""The two keys of a build, and the source files behind them. Imports no torch.

The direct key stands for a spec on a machine; with the digests of the source files that the last trace read, it finds
an artifact without tracing. The content key names the artifact: it digests what was traced and what it is compiled for.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from fxc import machine
from fxc.cache import Cache, Trust, key
from fxc.cache.trust import check
from fxc.errors import FxcError
from fxc.manifest import Factor, Manifest, Source
from fxc.ranks import Ranks
from fxc.spec import Spec
from fxc.target import Target

MODULE = "module:"
VARIABLE = "env:"
COMPILER = "compiler:"
TUNING = "tuning:"
PACKAGES = ("fxc", "fxc.cache", "fxc.passes")
"""Whose sources are in the direct key: what the command line adds makes no artifact another one."""

EXCLUDED = (
    "folder", "working directory", "user", "host name", "environment variables", "comments", "ranks", "cores",
    "device index", "memory of the GPU", "cudagraph",
)  # fmt: skip
"""What is kept out of the content key and of those of binaries: it changes nothing that they stand for. A variable that
the model reads, and ranks whose graphs differ, come in through the graph."""


def direct_factors(spec: Spec, target: Target, place: Ranks) -> tuple[Factor, ...]:
    """What a user can change without touching a source file, and fxc itself. CUDA graph settings are left out: they
    compile nothing. So is the order of keys in model.yaml, but that of inputs and dims, which programs have too."""
    plain = msgspec.structs.replace(spec, cudagraph=type(spec.cudagraph)())
    target = msgspec.structs.replace(target, compiler="")  # is among the sources
    pairs = [
        ("fxc", fxc_version()),
        ("code", own_code()),
        ("spec", msgspec.json.encode(plain, order="deterministic").decode()),
        ("inputs", " ".join(spec.inputs)),
        ("dims", " ".join(spec.dims)),
        ("target", msgspec.json.encode(target).decode()),
        ("python", "{}.{}".format(*sys.version_info)),
        ("transformers", _installed("transformers") if spec.model.huggingface is not None else ""),
        ("ranks", msgspec.json.encode(place).decode()),
    ]
    return tuple(Factor(name=name, value=value) for name, value in pairs)


def direct_key(spec: Spec, target: Target, place: Ranks) -> str:
    """Digest of the direct factors."""
    return content_key(direct_factors(spec, target, place))


def content_key(factors: Sequence[Factor]) -> str:
    """The artifact's name, from its factors."""
    return key.combine([(factor.name, factor.value) for factor in factors])


def find(
    spec: Spec, directory: Path, place: Ranks, cache: Cache, *, compiler: bool = False, target: Target | None = None,
    tuning: str | None = None,
) -> str | None:  # fmt: skip
    """The artifact for a spec whose sources are as they were when it was traced; None when it has to be traced.

    Args:
        compiler: whether it has to be what this machine's host compiler makes. A loader asks for none.
        target: what it is built for; by default what this machine can load.
        tuning: digest of the tuning record that it has to be built with; any will do by default.
    """
    return search(cache.lookup, spec, directory, place, compiler=compiler, target=target, tuning=tuning)


def search(
    lookup: Callable[[str, Callable[[Source], str | None]], str | None], spec: Spec, directory: Path, place: Ranks, *,
    compiler: bool = False, target: Target | None = None, tuning: str | None = None,
) -> str | None:  # fmt: skip
    """The same by the `lookup` of any cache."""
    digest = comparer(directory, compiler, tuning)
    for wanted in machine.served(spec.device) if target is None else (target,):
        if found := lookup(direct_key(spec, wanted, place), digest):
            return found
    return None


def comparer(directory: Path, compiler: bool, tuning: str | None = None) -> Callable[[Source], str | None]:
    """Gives what a source is now, each file read once; with `compiler` false, any host compiler will do, without
    `tuning` any record."""
    known: dict[str, str | None] = {}

    def now(source: Source) -> str | None:
        if source.file == TUNING:
            return source.digest if tuning is None else tuning
        if source.file == COMPILER and not compiler:
            return source.digest
        if source.file not in known:
            known[source.file] = digest_of(source, directory)
        return known[source.file]

    return now


def remember(cache: Cache, direct: str, manifest: Manifest) -> None:
    """Have `find` find this artifact while its sources, and the compiler, are what they are now. Where it is not known
    what some source was when it was traced, the next build has to trace again."""
    if sources := index_sources(manifest):
        cache.remember(direct, manifest.hash, sources)


def index_sources(manifest: Manifest) -> tuple[Source, ...]:
    """What an entry of the index has to be compared with; none where that is not known."""
    if not all(source.digest for source in manifest.sources):
        return ()
    compiler = Source(file=COMPILER, digest=key.digest(manifest.target.compiler))
    return (*manifest.sources, compiler, Source(file=TUNING, digest=manifest.tuning))


def remember_all(cache: Cache, manifest: Manifest) -> None:
    """The same for an artifact that was built elsewhere, under the direct keys of its builds."""
    for direct in direct_keys(manifest):
        remember(cache, direct, manifest)


def direct_keys(manifest: Manifest) -> list[str]:
    """Those under which its ranks were built."""
    return [content_key(rank.direct) for rank in manifest.ranks.values() if rank.direct]


def sources(files: Iterable[Path], variables: Iterable[str], directory: Path, began: int) -> tuple[Source, ...]:
    """Records of source files: relative to model.yaml's directory, or as modules where they are installed packages.
    And of environment variables.

    The digest is empty where a file cannot be read, or was written after the trace `began` (nanoseconds since the
    epoch): the graph may be that of the text before.
    """
    names: dict[Path, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "site-packages" in file:
            names.setdefault(Path(file), MODULE + name)
    found = {}
    for file in files:
        if file.name.startswith("<"):  # text that some other file had executed
            continue
        if not file.is_absolute():  # how torch names one of its own in a stack trace
            name = MODULE + ".".join(file.with_suffix("").parts)
            file = _module_file(name.removeprefix(MODULE)) or file
        else:
            name = names.get(file, "")
            if not name or _module_file(name.removeprefix(MODULE)) != file:
                name = os.path.relpath(file, directory)
        digest = digest_of(Source(file=name, digest=""), directory) or ""
        found[name] = Source(file=name, digest="" if _written(file) > began else digest)
    for variable in variables:
        name = VARIABLE + variable
        found[name] = Source(file=name, digest=_digest_of_variable(variable))
    return tuple(found[name] for name in sorted(found))


def files(sources: Iterable[Source], directory: Path) -> tuple[str, ...]:
    """Absolute paths of those that are files, but of no installed package."""
    names = (source.file for source in sources if not source.file.startswith((MODULE, VARIABLE, COMPILER)))
    return tuple(os.path.abspath(directory / name) for name in names)


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


def _written(file: Path) -> int:
    """When a file was last written, moved or linked, whatever time it was given."""
    try:
        return file.stat().st_ctime_ns
    except OSError:
        return 0


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
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():  # several, without origin, of a namespace package
        base = Path(folder).joinpath(*rest.split("."))
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def fxc_version() -> str:
    return _installed("fxc")


@functools.cache
def own_code() -> str:
    """Digest of fxc's own sources: other ones may make another artifact of the same spec. Takes 2 to 4 ms."""
    parts: list[tuple[str, str]] = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for where, inner, files in os.walk(folder):
                apart = ("cache", "passes", "cli") if where == folder and package == "fxc" else ()
                inner[:] = sorted(name for name in inner if name not in apart)
                for name in sorted(name for name in files if name.endswith(".py")):
                    path = os.path.join(where, name)
                    with open(path, "rb") as file:
                        parts.append((f"{package}/{os.path.relpath(path, folder)}", key.digest(file.read())))
    return key.combine(parts)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def intact(cache: Cache, hash: str, place: Ranks, proved: bool, verified: bool = True) -> bool:
    """Whether the artifact is there with this rank, all files as they were written, and proved if it has to be; on a
    device of its kind if it has to be `verified`, too."""
    try:
        artifact = check(cache.artifact(hash), Trust.unsigned(os.environ))
        rank_dir = artifact.rank_dir(place.rank, place.data_parallel_rank)
        artifact.verify(rank_dir)
    except FxcError:
        return False
    manifest = artifact.manifest
    enough = not proved or (manifest.proved and (manifest.verified or not verified))
    return enough and artifact.manifest.ranks[rank_dir].world_size == place.world_size
