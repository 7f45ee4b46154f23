"""Which passes a build runs, over every unit, and what they found."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import fx

from fxc import choose
from fxc._torch_build import map_leaves
from fxc.cache import key
from fxc.convert import suggest
from fxc.errors import FxcError, PassError, SpecError, UsageError
from fxc.imports import importable
from fxc.lower import Unit
from fxc.manifest import NearMiss, PassReport, PassSite
from fxc.models.files import load_file
from fxc.models.target import describe
from fxc.passes import PIPELINE, Outcome, Pass, Ran, configure, costs, enabled, identity, run, run_whole
from fxc.shapes import Range
from fxc.spec import Spec
from fxc.target import Target
from fxc.traced import Traced


def passes(
    spec: Spec, directory: Path, target: Target, extra: Sequence[Pass] = ()
) -> tuple[tuple[Pass, ...], set[Path]]:
    """The passes that run at the spec's level for the target, in order, and the source files of a user's own.

    Raises:
        SpecError: a pass in `passes.custom` cannot be imported, or `passes` names what there is not.
    """
    names = spec.passes.get("custom", ())
    custom = tuple(_load(f"passes.custom[{index}]", name, directory) for index, name in enumerate(names))
    known = configure(spec.passes, (*PIPELINE, *custom))
    files = {Path(inspect.getfile(cls)).resolve() for cls in custom}
    both = (*known, *extra)
    _check(both, spec.compile.level, target)
    return enabled(both, spec.compile.level, target), files


def _check(passes: Sequence[Pass], level: int, target: Target) -> None:
    """Names are unique, and a pass that has to match can run."""
    for index, entry in enumerate(passes):
        if any(entry.name == other.name for other in passes[:index]):
            raise UsageError(f"two passes are called {entry.name}", "give one of them another `name`")
        if entry.enabled and entry.expect and entry.level <= level and not entry.runs_on(target):
            device = "compute capability {}.{}".format(*target.compute_capability or (0, 0))
            raise PassError(f"pass {entry.name} does not run on {device}, passes.{entry.name}.expect is {entry.expect}")


def _load(where: str, text: str, directory: Path) -> type[Pass]:
    """The class that `package.module:Pass` or `FILE.py:Pass`, relative to model.yaml, names."""
    place, _, name = text.rpartition(":")
    module = _import(where, place, directory)
    found: Any = getattr(module, name, None)
    if found is None:
        own = [key for key, value in vars(module).items() if _is_pass(value)]
        raise SpecError(f"{where}: {place} has no {name!r}", suggest(name, own, "its passes"))
    if not _is_pass(found) or not isinstance(getattr(found, "name", None), str):
        hint = "derive a frozen dataclass with a `name` from fxc.passes.Pass"
        raise SpecError(f"{where}: {name} in {place} is no pass", hint)
    cls: type[Pass] = found
    return cls


def _is_pass(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Pass)


def _import(where: str, place: str, directory: Path) -> ModuleType:
    try:
        if place.endswith(".py"):
            path = directory / place
            if not path.is_file():
                raise SpecError(f"{where}: {path} does not exist", "the path is relative to model.yaml")
            return load_file(path)
        with importable(directory):
            return importlib.import_module(place)
    except FxcError:
        raise
    except Exception as error:
        hint = "see the traceback with -v"
        raise SpecError(f"{where}: {place} cannot be imported: {describe(error)}", hint) from error


TIMED = 3
"""The level from which on fusions are timed."""


class Found:
    """Runs passes over units, and keeps what they found."""

    def __init__(self, passes: Sequence[Pass], target: Target, level: int) -> None:
        """
        Args:
            level: `compile.level`: whether fusions are kept by what was measured, or timed.
        """
        self.passes = passes
        self.device = target.device
        self.level = level
        self._piece_passes = [entry for entry in passes if entry.scope == "piece"]
        self._costs = costs.of(target.compute_capability) if level < TIMED else ()
        self._ran: dict[tuple[str, Range], Ran] = {}
        self._sites: dict[tuple[str, str, str], Outcome] = {}
        """By pass, piece and range."""
        self._general: dict[tuple[str, str], int] = {}
        """Matches by pass and piece: the most in a range of the general program."""

    @property
    def identity(self) -> str:
        """All passes that run, with options and sources: a factor of the artifact's name."""
        parts = [f"{entry.name}:{identity(entry)}" for entry in self.passes]
        return " ".join([*parts, *([f"costs:{key.digest(repr(self._costs).encode())}"] if self._costs else [])])

    def whole(self, traced: Traced, name: str) -> Traced:
        """The graph with what passes make of it before it is cut; itself where they find nothing.

        Args:
            name: of the step, `step_0`.
        """
        passes = [entry for entry in self.passes if entry.scope == "graph"]
        if not passes:
            return traced
        copy = copied(traced)
        try:
            changed, outcomes = run_whole(copy.graph, traced.range, passes, self.device)
        except PassError as error:
            raise _named(error, name) from error.__cause__
        for entry, outcome in outcomes:
            self._sites[entry, name, traced.range.label] = outcome
            self._general[entry, name] = len(outcome.matches)
        if not changed:
            return traced
        results = dict(zip(_results(traced), _results(copy), strict=True))
        output = map_leaves(lambda leaf: results[leaf] if isinstance(leaf, fx.Node) else leaf, traced.output)
        return dataclasses.replace(copy, output=output, original=traced)

    def rewritten(self, unit: Unit, name: str, general: bool) -> Unit:
        """The unit with what passes make of its piece.

        Args:
            name: of the piece, `piece_1`.
            general: whether the unit is part of the general program.
        """
        at = (unit.piece.text, unit.range)
        if at not in self._ran:
            try:
                self._ran[at] = run(unit.piece.text, unit.range, self._piece_passes, self._costs)
            except PassError as error:
                raise _named(error, unit.label) from error.__cause__
        ran = self._ran[at]
        for entry, outcome in ran.outcomes:
            self._sites[entry, name, unit.range.label] = outcome
            if general:
                most = max(self._general.get((entry, name), 0), len(outcome.matches))
                self._general[entry, name] = most
        if not ran.changed_by:
            return unit
        made = _with(unit, ran)
        fusions = [entry.name for entry in ran.changed_by if entry.fuses]
        if self.level < TIMED or not fusions:
            return made

        def without(left_out: frozenset[str]) -> Unit:
            rest = [entry for entry in self._piece_passes if entry.name not in left_out]
            other = run(unit.piece.text, unit.range, rest)
            return _with(unit, other) if other.changed_by else unit

        return choose.forms(made, fusions, without)

    def reports(self) -> tuple[PassReport, ...]:
        """One for each pass.

        Raises:
            PassError: a pass did not match as often as its `expect` says.
        """
        reports = tuple(map(self._report, self.passes))
        for entry, report in zip(self.passes, reports, strict=True):
            if entry.expect is not None and report.matches != entry.expect:
                missed = [(site, miss) for site in report.sites for miss in site.near_misses]
                hints = [f"{site.piece} {site.shape}, {miss.node}: {miss.reason}" for site, miss in missed]
                raise PassError(
                    f"pass {entry.name} matched {report.matches} times, passes.{entry.name}.expect is {entry.expect}",
                    hints[0] if hints else "",
                )
        return reports

    def _report(self, entry: Pass) -> PassReport:
        sites = tuple(
            PassSite(
                piece=piece, shape=shape, matches=outcome.matches,
                near_misses=tuple(NearMiss(node=miss.node, reason=miss.reason) for miss in outcome.near_misses),
            )
            for (name, piece, shape), outcome in self._sites.items()
            if name == entry.name
        )  # fmt: skip
        return PassReport(
            name=entry.name,
            matches=sum(count for (name, _), count in self._general.items() if name == entry.name),
            missed=entry.fuses and bool(sites) and not any(site.matches for site in sites),
            sites=sites,
        )


def _with(unit: Unit, ran: Ran) -> Unit:
    """A unit of what passes made of its piece."""
    names = tuple(entry.name for entry in ran.changed_by)
    return dataclasses.replace(unit, text=ran.text, passes=ran.identity, changed_by=names)


def _named(error: PassError, where: str) -> PassError:
    """The error, with the place where it came up."""
    error.message = f"{where}: {error.message}"
    error.args = (error.message,)
    return error


def copied(traced: Traced) -> Traced:
    """A graph of its own, to be changed, whose results are still to be put into the output's structure."""
    graph = fx.Graph()
    places: dict[fx.Node, Any] = {}
    graph.output(graph.graph_copy(traced.graph, places))
    for node in graph.nodes:
        if "base" in node.meta:
            node.meta["base"] = places[node.meta["base"]]
    return dataclasses.replace(traced, graph=graph)


def _results(traced: Traced) -> list[Any]:
    (output,) = traced.graph.find_nodes(op="output")
    return list(output.args[0])
