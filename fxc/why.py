"""Why a model.yaml is not in the cache: the nearest artifact, what differs, what a build would cost. Compiles nothing.

What a user can change (keys of model.yaml, source files, the machine, fxc) is compared without a trace. With one, so
are the factors of the content key, and it is known which binaries are missing.
"""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from fxc import identity, records, refs
from fxc.cache import Artifact, Cache
from fxc.cost import Needed, estimate, expected, label, like
from fxc.errors import FxcError
from fxc.manifest import Factor, Manifest, Rank, Source
from fxc.manifest import Tensor as TensorRecord
from fxc.pipeline import Goal
from fxc.ranks import Ranks, ranks
from fxc.spec import Spec, load_spec
from fxc.target import Target
from fxc.tuning import Tuning

GRAPH = "computation_graph.py"
CONTEXT = 1
"""Lines around a difference of two graphs."""


class Difference(msgspec.Struct, frozen=True):
    """Something that is not as it was."""

    name: str
    """A dotted key of model.yaml (`spec.compile.sizes`), a source file (`source.model.py`), or a factor."""
    old: str
    """In the nearest artifact; empty where there was none."""
    new: str
    lines: tuple[str, ...] = ()
    """Where both values are digests of a text, the lines of it that differ, as `diff -u` writes them."""


class Why(msgspec.Struct, frozen=True):
    """What `why --json` prints."""

    hit: bool
    reason: str
    """One line."""
    hash: str | None
    """The artifact that a model.yaml stands for; null where that takes a trace and there was none."""
    nearest: str | None
    changed: tuple[Difference, ...] = ()
    """Keys of model.yaml, source files, facts of the machine and of fxc."""
    factors: tuple[Difference, ...] = ()
    """Parts of the artifact's name; none without a trace."""
    compile: tuple[Needed, ...] = ()
    """Binaries that are not in the cache. Without a trace, the pieces of the nearest artifact for all sizes
    and ranges, or for the sizes that it lacks if nothing else has changed."""
    binaries: int = 0
    """All that the artifact has."""
    seconds: float | None = None
    """An estimate for the whole build, from what the nearest artifact took."""


def explain(
    path: Path, *, other: str | Path | None = None, overrides: Iterable[str] = (), level: int | None = None,
    rank: int | None = None, world_size: int | None = None, dp_rank: int | None = None, cache_dir: Path | None = None,
    trace: bool = True, tuning: str = "auto", target: str | Path | None = None, march: str | None = None,
) -> Why:  # fmt: skip
    """Whether a model.yaml is in the cache, and why not.

    Args:
        other: the artifact to compare with; by default the nearest one in the cache.
        trace: whether to trace the model, which takes seconds, where it is not found otherwise. Never for a `target`.
        tuning, target, march: as of `build`.

    Raises:
        SpecError: something is wrong with model.yaml or with what it names.
        TraceError: it cannot be traced.
    """
    spec, directory = load_spec(path, overrides, level), path.resolve().parent
    place, cache = ranks(rank, world_size, dp_rank), Cache.open(cache_dir)
    goal = Goal.of(spec, None if target is None else records.find(os.fspath(target)), march, tuning, cache)
    found = identity.find(spec, directory, place, cache, compiler=True, target=goal.target, tuning=goal.tuned)
    if found is not None and other is None:
        return Why(True, "it is in the cache", found, found, binaries=len(cache.artifact(found).manifest.binaries))
    direct = identity.direct_factors(spec, goal.target, place)
    near = refs.find(other, cache_dir) if other is not None else _nearest(cache, direct)
    changed: tuple[Difference, ...] = ()
    if near is not None:
        changed = (*_changed(near.manifest, direct, directory, place), *_tools(near.manifest, goal.target, goal.tuned))
    if found is not None:
        return Why(True, "it is in the cache", found, _hash(near), changed)
    if not trace or goal.record is not None:
        return _guessed(spec, near, changed)
    return _traced(spec, directory, cache, goal.target, goal.tuning, near, changed)


def compare(old: Artifact, new: Artifact) -> Why:
    """How two artifacts differ; nothing is traced."""
    was, now = old.manifest, new.manifest
    direct = next(iter(now.ranks.values())).direct if now.ranks else ()
    changed = [*_keys("spec", _json(was.spec), _json(now.spec)), *_keys("target", _json(was.target), _json(now.target))]
    first = next(iter(was.ranks.values()), None)
    changed += [entry for entry in _values(first.direct if first else (), direct) if entry.name in ("code", "python")]
    before = {source.file: source.digest for source in was.sources}
    after = {source.file: source.digest for source in now.sources}
    changed += [
        Difference(f"source.{file}", before.get(file, ""), after.get(file, ""))
        for file in sorted(before.keys() | after.keys())
        if before.get(file) != after.get(file)
    ]
    factors = tuple(_factors(old, now, _graph(new)))
    missing = tuple(
        Needed(label(now, binary), binary.seconds) for key, binary in now.binaries.items() if key not in was.binaries
    )
    reason = (
        "they are the same" if was.hash == now.hash else f"they differ in {', '.join(entry.name for entry in factors)}"
    )
    return Why(was.hash == now.hash, reason, now.hash, was.hash, tuple(changed), factors, missing, len(now.binaries))


def _traced(
    spec: Spec, directory: Path, cache: Cache, target: Target, tuning: Tuning | None, near: Artifact | None,
    changed: tuple[Difference, ...],
) -> Why:  # fmt: skip
    from fxc.plan import make_plan

    start = time.perf_counter()
    plan = make_plan(spec, directory, target, tuning=tuning)
    seconds, manifest = time.perf_counter() - start, plan.manifest
    count = len(plan.units)
    try:
        cache.artifact(manifest.hash)
    except FxcError:
        pass
    else:
        reason = "it is in the cache, but a build has to trace again to know that"
        return Why(True, reason, manifest.hash, manifest.hash, changed, binaries=count, seconds=seconds)
    factors = () if near is None else tuple(_factors(near, manifest, plan.files[GRAPH].decode()))
    missing = [unit for unit in plan.units if cache.binary(unit.key) is None]
    known = [*near.manifest.binaries.values()] if near is not None else []
    needed = tuple(Needed(unit.label, like(known, unit.range.label)) for unit in missing)
    reason = _reason(near, changed or factors)
    return Why(
        False, reason, manifest.hash, _hash(near), changed, factors, needed, count, estimate(near, needed, seconds)
    )


def _guessed(spec: Spec, near: Artifact | None, changed: tuple[Difference, ...]) -> Why:
    """Without a trace."""
    reason = _reason(near, changed)
    if near is None:
        return Why(False, reason, None, None)
    names = {entry.name for entry in changed}
    needed = expected(spec, near.manifest, names == {"spec.compile.sizes"}) if names else ()
    trace = near.manifest.seconds.get("trace", 0.0)
    seconds = estimate(near, needed, trace) if needed else near.manifest.seconds.get("total")
    count = len(near.manifest.binaries)
    return Why(False, reason, None, near.manifest.hash, changed, (), needed, count, seconds)


def _hash(artifact: Artifact | None) -> str | None:
    return None if artifact is None else artifact.manifest.hash


def _reason(near: Artifact | None, differences: tuple[Difference, ...]) -> str:
    if near is None:
        return "there is no artifact of this model in the cache"
    if not differences:
        return "nothing that can be seen without a trace differs: the index has no entry for it"
    names = ", ".join(entry.name for entry in differences[:3])
    more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
    return f"not as {near.manifest.hash} was built: {names}{more}"


# The nearest artifact


def _nearest(cache: Cache, direct: tuple[Factor, ...]) -> Artifact | None:
    """Of the same model, the one most of whose keys and facts are the same; of several, the newest."""
    wanted = {factor.name: factor.value for factor in direct}
    spec, target = _flat("", _json(wanted["spec"], Spec)), _flat("", _json(wanted["target"]))
    model = {name: value for name, value in spec.items() if name in ("model.target", "model.huggingface")}

    def score(manifest: Manifest) -> tuple[int, str]:
        has = (_flat("", _json(manifest.spec)), _flat("", _json(manifest.target)))
        pairs = zip((spec, target), has, strict=True)
        return sum(there.get(name) == value for mine, there in pairs for name, value in mine.items()), manifest.created

    manifests = [entry.manifest for entry in cache.list() if entry.manifest is not None]
    same = [m for m in manifests if model.items() <= _flat("", _json(m.spec)).items()]
    return cache.artifact(max(same, key=score).hash) if same else None


# What differs


def _changed(manifest: Manifest, direct: tuple[Factor, ...], directory: Path, place: Ranks) -> Iterable[Difference]:
    """Direct factors that differ from those of the same rank, and source files that are not what they were."""
    rank = manifest.ranks.get(place.directory) or next(iter(manifest.ranks.values()), None)
    yield from _values(_direct(manifest, rank), direct)
    for source in manifest.sources:
        now = identity.digest_of(source, directory)
        if now != source.digest:
            yield _source(source, now)


def _tools(manifest: Manifest, target: Target, tuned: str | None) -> Iterable[Difference]:
    """What a build compares besides: the host compiler, where there is one here, and the tuning record."""
    if target.compiler and manifest.target.compiler != target.compiler:
        yield Difference("compiler", manifest.target.compiler, target.compiler)
    if tuned is not None and manifest.tuning != tuned:
        yield Difference("tuning", manifest.tuning or "none", tuned or "none")


def _direct(manifest: Manifest, rank: Rank | None) -> tuple[Factor, ...]:
    """Those that a rank was built with; where it has none, those that can be told from the manifest."""
    if rank is not None and rank.direct:
        return rank.direct
    plain = msgspec.structs.replace(manifest.target, compiler="")
    return (
        Factor(name="spec", value=msgspec.json.encode(manifest.spec).decode()),
        Factor(name="target", value=msgspec.json.encode(plain).decode()),
    )


def _source(source: Source, now: str | None) -> Difference:
    if source.file.startswith(identity.VARIABLE):
        return Difference(f"environment.{source.file.removeprefix(identity.VARIABLE)}", source.digest, now or "")
    return Difference(f"source.{source.file}", source.digest, now or "is gone")


def _values(old: Iterable[Factor], new: Iterable[Factor]) -> Iterable[Difference]:
    """Named values that both have and that differ; JSON objects key by key."""
    before = {factor.name: factor.value for factor in old}
    for factor in new:
        was = before.get(factor.name)
        if was is None or was == factor.value:
            continue
        if factor.value.startswith("{") and was.startswith("{"):
            kind = Spec if factor.name == "spec" else None
            yield from _keys(factor.name, _json(was, kind), _json(factor.value, kind))
        else:
            yield Difference(factor.name, was, factor.value)


def _factors(old: Artifact, now: Manifest, graph: str) -> Iterable[Difference]:
    for entry in _values(old.manifest.factors, now.factors):
        if entry.name == "graph":
            yield msgspec.structs.replace(entry, lines=_lines(_graph(old), graph))
        elif entry.name == "weights":
            lines = _lines(_layouts(old.manifest.weights), _layouts(now.weights), 0)
            yield msgspec.structs.replace(entry, lines=lines)
        else:
            yield entry


def _keys(name: str, old: object, new: object) -> Iterable[Difference]:
    before, after = _flat(name, old), _flat(name, new)
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) != after.get(key):
            yield Difference(key, before.get(key, ""), after.get(key, ""))


def _flat(name: str, value: object) -> dict[str, str]:
    """Leaves by dotted name, as JSON."""
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, entry in value.items():
            found |= _flat(f"{name}.{key}" if name else str(key), entry)
        return found
    return {name: value if isinstance(value, str) else msgspec.json.encode(value).decode()}


def _json(value: object, kind: type[Spec] | None = None) -> object:
    """Plain data, with the defaults that a struct leaves out where it is written."""
    if isinstance(value, str):
        return _json(msgspec.json.decode(value, type=kind) if kind else msgspec.json.decode(value))
    if isinstance(value, msgspec.Struct):
        return {field: _json_value(getattr(value, field)) for field in value.__struct_fields__}
    return value


def _json_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _json_value(entry) for key, entry in value.items()}
    return _json(value) if isinstance(value, msgspec.Struct) else value


def _graph(artifact: Artifact) -> str:
    first = min(artifact.manifest.ranks, default="rank_0_0")
    try:
        return artifact.read(f"{first}/{GRAPH}").decode()
    except FxcError:
        return ""


def _layouts(tensors: Iterable[TensorRecord]) -> str:
    return "\n".join(f"{t.name}: {t.dtype}[{', '.join(map(str, t.shape))}]" for t in tensors)


def _lines(old: str, new: str, context: int = CONTEXT) -> tuple[str, ...]:
    """As `diff -u`, without numbers of lines of source: one that only moved is no difference of the graph."""
    before, after = (re.sub(r"(?m)^( *# \S+):\d+ in ", r"\1 in ", text).splitlines() for text in (old, new))
    found = difflib.unified_diff(before, after, n=context, lineterm="")
    return tuple(line for line in found if not line.startswith(("---", "+++")))
