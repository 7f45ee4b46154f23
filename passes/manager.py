"""Chooses passes and their options, and runs them over a piece's graph, which is checked after each. Pure."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from torch import fx

from fxc.cache import key
from fxc.convert import convert
from fxc.errors import PassError, SpecError, UsageError
from fxc.graph_text import parse_graph, print_graph, rename
from fxc.passes.base import NearMiss, Outcome, Pass
from fxc.passes.check import complete, contract, fault
from fxc.passes.costs import Cost, slower
from fxc.passes.graph import source, sweep
from fxc.shapes import Range
from fxc.target import Target


def configure(section: Mapping[str, Any], known: Sequence[type[Pass]]) -> tuple[Pass, ...]:
    """All known passes, in their order, with the options that `passes` of model.yaml gives them.

    Raises:
        SpecError: no such pass or option, or a value of a wrong type; names the key.
    """
    names = [cls.name for cls in known]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice or "custom" in names:
        raise SpecError(f"passes: {f'two passes are called {twice!r}' if twice else 'no pass can be called custom'}")
    kinds = [(cls.name, _kind(cls)) for cls in known]
    options: list[Any] = [(name, kind, msgspec.field(default_factory=kind)) for name, kind in kinds]
    inner = msgspec.defstruct("passes", [*options, ("custom", tuple[str, ...], ())], forbid_unknown_fields=True)
    given: Any = convert({"passes": section}, msgspec.defstruct("spec", [("passes", inner)]), "")
    passes = tuple(cls(**msgspec.structs.asdict(getattr(given.passes, cls.name))) for cls in known)
    negative = next((entry for entry in passes if entry.expect is not None and entry.expect < 0), None)
    if negative:
        raise SpecError(f"passes.{negative.name}.expect: {negative.expect}, expected 0 or more matches")
    return passes


def _kind(cls: type[Pass]) -> type[msgspec.Struct]:
    """A struct with the options of a pass, for `convert`, which tells people what is wrong."""
    types = get_type_hints(cls)
    fields = [(field.name, types[field.name], field.default) for field in dataclasses.fields(cls)]
    return msgspec.defstruct(cls.name, fields, forbid_unknown_fields=True)


def enabled(passes: Iterable[Pass], level: int, target: Target) -> tuple[Pass, ...]:
    """Those that run at `compile.level` for this device."""
    return tuple(entry for entry in passes if entry.enabled and 0 < entry.level <= level and entry.runs_on(target))


def identity(entry: Pass) -> str:
    """Digest of what decides what a pass does: its module's source, its options, its kernels' sources."""
    files = [_own_file(entry), *map(_module_file, entry.kernels)]
    options = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry) if f.name not in ("enabled", "expect")}
    parts = [("name", entry.name), ("options", repr(sorted(options.items())))]
    return key.combine([*parts, *(("source", key.digest(file.read_bytes())) for file in files)])


def _own_file(entry: Pass) -> Path:
    try:
        return Path(inspect.getfile(type(entry)))
    except (TypeError, OSError):
        what = f"pass {entry.name}: {type(entry).__name__} is defined in no file, which would tell when it is edited"
        raise UsageError(what, "move it into a module, or name it in passes.custom") from None


def _module_file(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


Outcomes = tuple[tuple[str, Outcome], ...]
"""By name of the pass, of those that looked at something."""


@dataclass(frozen=True)
class Ran:
    """What passes made of a piece for a range of sizes."""

    text: str
    """Canonical source, as `Piece.text`; the same where no pass found anything."""
    changed_by: tuple[Pass, ...] = ()
    outcomes: Outcomes = ()

    @property
    def identity(self) -> str:
        """Digest of the passes that changed the piece; empty where none did."""
        return key.combine([(entry.name, identity(entry)) for entry in self.changed_by]) if self.changed_by else ""


def run(text: str, box: Range, passes: Iterable[Pass], costs: Sequence[Cost] = ()) -> Ran:
    """Run passes, in order, over a piece's source for the sizes in `box`.

    Args:
        costs: what was measured of fusions; those that are slower for these sizes are taken back.

    Raises:
        PassError: a pass failed, or left a graph that is not valid.
    """
    graph, _ = parse_graph(text)
    graph, changed_by, outcomes = _all(graph, box, passes, costs, None)
    if not changed_by:
        return Ran(text, (), outcomes)
    rename(graph)
    return Ran(print_graph(graph, "piece"), changed_by, outcomes)


def run_whole(graph: fx.Graph, box: Range, passes: Iterable[Pass], device: str) -> tuple[bool, Outcomes]:
    """Run passes, in order, over a traced graph, which they change.

    Args:
        device: where the graph's tensors lie.

    Returns:
        Whether they did, and what they found.

    Raises:
        PassError: a pass failed, or left a graph that is not valid.
    """
    _, changed_by, outcomes = _all(graph, box, passes, (), device)
    return bool(changed_by), outcomes


def _all(
    graph: fx.Graph, box: Range, passes: Iterable[Pass], costs: Sequence[Cost], device: str | None
) -> tuple[fx.Graph, tuple[Pass, ...], Outcomes]:
    """The graph, those that changed it, and what all of them found."""
    wanted = contract(graph)
    before, changed_by, outcomes = print_graph(graph, "piece"), [], []
    for entry in passes:
        if not entry.wants(box):
            continue
        known = {*graph.nodes}
        outcome = _one(entry, graph, box, device)
        after = print_graph(graph, "piece")
        made = [node for node in graph.nodes if node not in known and source(node).startswith("fxc::")]
        if reason := slower(costs, entry.name, made, box):
            (graph, _), after = parse_graph(before), before
            outcome = Outcome((), (*outcome.near_misses, *(NearMiss(name, reason) for name in outcome.matches)))
        if outcome.anchors:
            outcomes.append((entry.name, outcome))
        if after != before:
            if (wrong := fault(graph, wanted, box)) is not None:
                hint = _OFF.format(entry.name)
                error = PassError(f"pass {entry.name} leaves a graph that is not valid: {wrong}", hint)
                error.add_note(f"graph:\n{after}")
                raise error
            changed_by.append(entry)
            before = after
    return graph, tuple(changed_by), tuple(outcomes)


_OFF = "mend it, or build with --set passes.{}.enabled=false"


def _one(entry: Pass, graph: fx.Graph, box: Range, device: str | None) -> Outcome:
    known = {*graph.nodes}
    try:
        outcome = entry.run(graph, box)
        sweep(graph)
        complete(graph, box, known, device)
    except Exception as error:
        what = f"pass {entry.name} failed: {type(error).__name__}: {error}"
        raise PassError(what, _OFF.format(entry.name)) from error
    return outcome
