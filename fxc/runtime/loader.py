"""`load`: from a directory to a callable. Reads, never writes; needs no compiler, HOME or PATH."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fxc import _torch_run, machine, refs
from fxc.cache import Artifact, Trust
from fxc.cache.artifact import MEND
from fxc.cache.layout import MANIFEST
from fxc.errors import CacheMissError, DamagedError, UsageError
from fxc.manifest import Manifest, one_line
from fxc.manifest import Program as ProgramRecord
from fxc.manifest_check import require_consistent
from fxc.ranks import number
from fxc.runtime import custom_ops, private
from fxc.runtime.inputs import layout
from fxc.runtime.program import Program
from fxc.runtime.step import StepFactory
from fxc.spec import load_spec

CODE = "transformed_code.py"
CONSTANTS = "constants.safetensors"
BINARIES = "inductor"
REPLACED = 3
"""How often a binary may be replaced while it is loaded."""


def load(
    ref: str | Path,
    device: str | torch.device | None = None,
    *,
    cache_dir: Path | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    dp_rank: int | None = None,
    verify_key: str | Path | None = None,
) -> Program:
    """Load a built program.

    ref: the prefix of a hash in the cache, the path of an artifact anywhere, or the path of the model.yaml that it was
        built from, exactly as it and the sources are now.
    device: `cuda:1`; by default what the program was built for, the current one of several.
    cache_dir: the cache, for a hash or model.yaml; by default FXC_CACHE_DIR, then the user's cache folder.
    rank, world_size: by default RANK and WORLD_SIZE of the environment, then 0 and what the artifact says.
    dp_rank: the data-parallel rank, by default 0.
    verify_key: a PEM file with the Ed25519 public key that the artifact has to be signed with; by default
        FXC_VERIFY_KEY if FXC_TRUST=signed, else none.

    Raises:
        CacheMissError: no such artifact, or not this rank in it.
        IncompatibleError: it was built for another kind of machine or another torch.
        DamagedError: a file is missing or altered, or others could have written it (UntrustedError).
        RunError: an op that it calls is not registered.
    """
    rank = number(rank, "RANK")
    world_size = number(world_size, "WORLD_SIZE")
    trust = Trust.of(os.environ, None if verify_key is None else Path(verify_key))
    artifact = refs.find(ref, cache_dir, rank=rank, world_size=world_size, dp_rank=dp_rank, use=True, trust=trust)
    use = artifact.use()
    manifest = artifact.manifest
    require_consistent(manifest, str(artifact.path / MANIFEST), _is_dtype)
    folder = _rank_folder(artifact, rank or 0, world_size, dp_rank or 0)
    place = _device(device, manifest.target.device)
    machine.require_fit(manifest.target, machine.here(str(place)), machine.needs_of(manifest), machine.libraries())
    place = _with_index(place)
    custom_ops.prepare(manifest.custom_ops, Path(ref).resolve().parent if refs.is_spec(ref) else None)
    namespace = _execute(artifact, f"{folder}/{CODE}", place)
    runners = _runners(artifact, folder, place)
    factories = _factories(manifest, namespace, runners)
    cudagraph = load_spec(Path(ref)).cudagraph if refs.is_spec(ref) else None
    program = Program(
        manifest, place, factories, constants(artifact, f"{folder}/{CONSTANTS}", place),
        cudagraph=cudagraph, path=artifact.path,
    )  # fmt: skip
    weakref.finalize(program, use.close)  # until then `prune` leaves the artifact alone
    return program


def _rank_folder(artifact: Artifact, rank: int, world_size: int | None, dp_rank: int) -> str:
    folder = artifact.rank_dir(rank, dp_rank)
    built = artifact.manifest.ranks[folder].world_size
    if world_size is not None and world_size != built:
        raise CacheMissError(
            f"{folder} of artifact {artifact.manifest.hash} was built for a world of {built}, not of {world_size}",
            f"build it with --rank {rank} --world-size {world_size}, or load with world_size={built}",
        )
    return folder


def _device(device: str | torch.device | None, built_for: str) -> torch.device:
    try:
        place = torch.device(device or built_for)
    except RuntimeError:
        raise UsageError(f"{device!r} is not a device", "write cpu, cuda or cuda:0") from None
    return torch.device("cpu") if place.type == "cpu" else place


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _execute(artifact: Artifact, name: str, device: torch.device) -> dict[str, Any]:
    """Run the stitched program's text: the bytes that were checked, never imported by name. It then makes its tensors
    on `device`, which need not be the current one."""
    namespace: dict[str, Any] = {"__name__": f"fxc_{artifact.manifest.hash}"}
    try:
        code = compile(artifact.read(name), str(artifact.path / name), "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DamagedError(f"{artifact.path / name} is no program: {one_line(error)}", MEND) from None
    exec(code, namespace)
    namespace["DEVICE"] = device
    names = tuple(entry.name for entry in (*artifact.manifest.weights, *artifact.manifest.constants))
    if tuple(namespace.get("WEIGHTS", ())) != names:
        raise DamagedError(f"{artifact.path / name} lists other weights than manifest.json", MEND)
    for program in artifact.manifest.programs:
        if program.step not in namespace or program.step not in namespace.get("PIECES", (program.step,)):
            raise DamagedError(f"{artifact.path / name} has no step {program.step!r}", MEND)
    return namespace


def _runners(artifact: Artifact, folder: str, device: torch.device) -> dict[str, _torch_run.Piece]:
    """One runner per binary of this rank."""
    keys = dict.fromkeys(key for program in artifact.manifest.programs for key in program.binaries)
    return {key: _runner(artifact, f"{folder}/{BINARIES}/{key}.so", device) for key in keys}


def _runner(artifact: Artifact, library: str, device: torch.device) -> _torch_run.Piece:
    """Map a binary, each of its files read and checked before. The linker opens them again by their names: where a
    signature is asked for, since the place is not trusted, those of copies that nobody can change."""
    names = artifact.files_of(library)
    if not artifact.must_be_signed:
        return _map_in_place(artifact, names, device)
    with private.files({Path(name).name: artifact.read(name) for name in names}) as folder:
        return _torch_run.runner(folder / Path(library).name, device)


def _map_in_place(artifact: Artifact, names: Sequence[str], device: torch.device) -> _torch_run.Piece:
    """Make sure that what the linker has found is what was checked: a build may have put others in their place."""
    for _ in range(REPLACED):
        before = [_which(artifact.path / name) for name in names]
        for name in names:
            artifact.read(name)
        runner = _torch_run.runner(artifact.path / names[0], device)
        if [_which(artifact.path / name) for name in names] == before:
            return runner
    raise DamagedError(f"{artifact.path / names[0]} is changed while it is loaded", "load it when nobody writes there")


def _which(path: Path) -> tuple[int, ...]:
    """Tells a file from another one of the same name, and from itself with other contents."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _factories(
    manifest: Manifest, namespace: Mapping[str, Any], runners: Mapping[str, _torch_run.Piece]
) -> list[StepFactory]:
    """Per program, what makes its step; one for all programs that share step and pieces."""
    made: dict[tuple[str, tuple[str, ...]], StepFactory] = {}
    factories = []
    for program in manifest.programs:
        which = (program.step, program.binaries)
        if which not in made:
            made[which] = StepFactory(namespace[program.step], tuple(_pieces(program, namespace, runners)))
        factories.append(made[which])
    return factories


def _pieces(
    program: ProgramRecord, namespace: Mapping[str, Any], runners: Mapping[str, _torch_run.Piece]
) -> Sequence[Callable[..., Any]]:
    """A level 0 program's pieces are functions of its own text."""
    if "PIECES" in namespace:
        pieces: Sequence[Callable[..., Any]] = namespace["PIECES"][program.step]
        return pieces
    return tuple(runners[key] for key in program.binaries)


def constants(artifact: Artifact, name: str, device: torch.device) -> list[torch.Tensor]:
    """Lifted constants, the program's own: a mutated one is state of this program object."""
    constants = artifact.manifest.constants
    if not constants:
        return []
    from safetensors.torch import load as read_tensors

    try:
        tensors = read_tensors(artifact.read(name))
    except Exception as error:  # not all that it cannot read is a SafetensorError
        raise DamagedError(f"{artifact.path / name} is damaged: {one_line(error)}", MEND) from None
    for constant in constants:
        found = tensors.get(constant.name)
        came = "nothing" if found is None else layout(found.shape, found.dtype)
        if came != (expected := layout(constant.shape, constant.dtype)):
            raise DamagedError(
                f"{artifact.path / name} has {came} for constant {constant.name!r}, expected {expected}", MEND
            )
    return [tensors[constant.name].to(device) for constant in constants]


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
