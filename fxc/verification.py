"""`verify --run`: every binary of an artifact against its piece in eager on this machine, and a note of that."""

from __future__ import annotations

import ast
import itertools
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from fxc import machine, verified
from fxc.cache import Artifact, Cache
from fxc.errors import CompileError, DamagedError, ProofError, RunError, UsageError
from fxc.job_errors import hint_of
from fxc.jobs import CheckJob, UserOps
from fxc.lower import Unit
from fxc.manifest import Binary, Manifest, Proof, Unproved
from fxc.pool import Pool
from fxc.progress import Observer

FILE = "checks.json"
TEXTS = "pieces.py"


class Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What it takes to compare one binary with eager."""

    label: str
    """For people: `piece_1 num_tokens=8`."""
    piece: str
    """Name of the function in pieces.py that is the piece as it was traced."""
    points: tuple[dict[str, int], ...]
    lowest: dict[str, int]
    values: tuple[tuple[float, float] | None, ...]
    custom_ops: bool
    """Whether it calls ops that the model's files register."""


def encode(units: Iterable[Unit], names: Mapping[str, str]) -> bytes:
    """The text of `checks.json`: by key of the binary. `names`: by digest of the piece, `piece_1`."""
    entries = {
        unit.key: Checked(
            unit.label,
            names[unit.piece.unique],
            unit.points(),
            unit.range.low(),
            unit.piece.values,
            bool(unit.piece.custom_ops),
        )
        for unit in units
    }
    return msgspec.json.format(msgspec.json.encode(entries), indent=1) + b"\n"


def read(artifact: Artifact) -> tuple[dict[str, Checked], dict[str, str]]:
    """What an artifact says of its binaries, over all ranks, which have the same pieces; and the texts of those.

    Raises:
        RunError: it was built by a release that kept nothing.
        DamagedError: the file is not as it was written.
    """
    found: dict[str, Checked] = {}
    texts: dict[str, str] = {}
    for folder, rank in artifact.manifest.ranks.items():
        name = f"{folder}/{FILE}"
        if name in rank.files:
            try:
                found |= msgspec.json.decode(artifact.read(name), type=dict[str, Checked])
                text = artifact.read(f"{folder}/{TEXTS}").decode()
            except msgspec.DecodeError as error:
                raise DamagedError(f"{artifact.path / name} cannot be read: {error}", "build it again") from None
            functions = [entry for entry in ast.parse(text).body if isinstance(entry, ast.FunctionDef)]
            texts |= {entry.name: ast.get_source_segment(text, entry) or "" for entry in functions}
    if missing := artifact.manifest.binaries.keys() - found.keys():
        raise RunError(
            f"artifact {artifact.manifest.hash} does not say what {len(missing)} of its binaries are compared with",
            "an earlier release built it: fxc build --force",
        )
    return found, texts


def verify(artifact: Artifact, cache: Cache, directory: Path | None, jobs: int, observer: Observer) -> Manifest:
    """Run every binary at all its points on this machine's device against eager, and note that in the manifest.

    Args:
        directory: of model.yaml, where files that register custom ops lie.
        jobs: processes at a time, which share the device's memory.

    Returns:
        The manifest as it now is.

    Raises:
        UsageError: it is not in the cache, so nothing can be noted.
        IncompatibleError: the artifact is for another device.
        ProofError: a binary does not equal eager; names it and the point.
        CompileError: it cannot be loaded, or crashes.
        CacheIOError: the artifact cannot be written.
    """
    manifest = artifact.manifest
    if artifact.path.parent != cache.layout.artifacts:  # found out now, not when all has run
        raise UsageError(f"{artifact.path} is not in the cache {cache.root}", "`fxc import` or --cache-dir")
    machine.require_fit(
        manifest.target, machine.here(manifest.target.device), machine.needs_of(manifest), machine.libraries()
    )
    wanted, texts = read(artifact)
    places = {  # ranks may have other bytes under one key
        (Path(name).stem, file.sha256): name
        for rank in manifest.ranks.values()
        for name, file in rank.files.items()
        if name.endswith(".so")
    }
    if not places:  # level 0
        return manifest
    observer.phase("prove")
    observer.binaries(len(places), 0)
    found: dict[str, Binary] = {}
    with tempfile.TemporaryDirectory() as scratch, Pool(jobs) as pool:
        waiting, running, numbers = list(places.items()), dict[int, str](), itertools.count()
        while waiting or running:
            while waiting and len(running) < jobs:
                ((key, _), name), number = waiting.pop(), next(numbers)
                running[number] = key
                pool.send(_job(number, artifact, name, wanted[key], texts, directory, Path(scratch), jobs))
            reply = pool.receive()
            key = running.pop(reply.id)
            what = f"{wanted[key].label} of artifact {manifest.hash}"
            if reply.result is None:
                raise _failure(what, reply.error, reply.detail)
            found[key] = _proved(manifest.binaries[key], reply.result)
            observer.compiled(wanted[key].label, reply.seconds)
    return cache.amend(artifact, verified.note(manifest, found)).manifest


def user_ops(artifact: Artifact, directory: Path | None) -> UserOps:
    """What registers the custom ops of an artifact's pieces; `directory`: of model.yaml, this one by default."""
    imports = {op.module for op in artifact.manifest.custom_ops if op.module and op.module != "fxc.ops"}
    folder = directory or Path.cwd()
    files = (str(folder / name) if name.endswith(".py") else name for name in sorted(imports))
    return UserOps(tuple(files), str(folder))


def _job(
    number: int, artifact: Artifact, name: str, entry: Checked, texts: Mapping[str, str], directory: Path | None,
    scratch: Path, jobs: int,
) -> CheckJob:  # fmt: skip
    place = scratch / str(number)
    place.mkdir(exist_ok=True)
    return CheckJob(
        id=number, label=entry.label, text=texts[entry.piece], device=artifact.manifest.target.device,
        ops=user_ops(artifact, directory) if entry.custom_ops else UserOps(),
        library=str(_library(artifact, name, place)),
        points=entry.points, lowest=entry.lowest, share=jobs, values=entry.values, directory=str(place),
    )  # fmt: skip


def _library(artifact: Artifact, name: str, place: Path) -> Path:
    """Where a binary is mapped from: where it lies, or in `place`, of this user alone, the bytes that were checked."""
    if not artifact.must_be_signed:
        return (artifact.path / name).absolute()
    for file in artifact.files_of(name):
        (place / Path(file).name).write_bytes(artifact.read(file))
    return place / Path(name).name


def _proved(binary: Binary, result: dict[str, list[dict[str, object]]]) -> Binary:
    proof = tuple(msgspec.convert({"piece": binary.piece, **line}, Proof) for line in result["proof"])
    unproved = tuple(msgspec.convert({"piece": binary.piece, **line}, Unproved) for line in result["unproved"])
    return msgspec.structs.replace(binary, checked=True, proof=proof, unproved=unproved)


def _failure(what: str, error: str, detail: str) -> ProofError | CompileError:
    made: ProofError | CompileError
    if error.startswith("ProofError: "):
        made = ProofError(
            f"{what} does not equal eager: {error.removeprefix('ProofError: ')}", "build it on this machine"
        )
    else:
        hint = hint_of(error, "`-v` shows more; build it on this machine")
        made = CompileError(f"{what} does not run: {error}", hint)
    made.add_note(detail)
    return made


def processes() -> int:
    """How many checks run at a time by default."""
    return min(4, len(os.sched_getaffinity(0)))
