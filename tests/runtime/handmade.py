"""Artifacts written by hand, by default of plain Python pieces, which take no compiler."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from fxc import machine
from fxc.manifest import (
    Binary,
    Constant,
    CustomOp,
    File,
    Input,
    Manifest,
    Piece,
    Program,
    Rank,
    Tensor,
    Weight,
    encode,
)
from fxc.shapes import Range, whole
from fxc.spec import CudagraphSpec, DimSpec, KVCacheSpec, ModelSpec, Spec
from fxc.target import Target

LINEAR = '''"""tiny"""
import torch
WEIGHTS = ("linear.weight", "bias")
def step_0(pieces, weights):
    (piece_0,) = pieces
    linear_weight, bias = weights
    def step(x, scale):
        (h,) = piece_0([x, linear_weight])
        return h * scale + bias
    return step
'''
PIECES = """
def piece_0(args):
    x, weight = args
    return (x @ weight.t(),)
PIECES = {"step_0": (piece_0,)}
"""


def span(low: int, high: int, name: str = "n") -> Range:
    return Range(((name, low, high),))


def write(
    folder: Path,
    *,
    code: str = LINEAR + PIECES,
    inputs: Sequence[Input] = (
        Input(name="x", shape=("n", 4), dtype="float32"),
        Input(name="scale", shape=("n", 1), dtype="float32"),
    ),
    weights: Sequence[Weight] = (
        Weight(name="linear.weight", shape=(4, 4), dtype="float32", aliases=("head.weight",)),
    ),
    constants: dict[str, torch.Tensor] | None = None,
    programs: Sequence[Program] = (
        Program(range=span(8, 8), step="step_0", binaries=()),
        Program(range=span(1, 32), step="step_0", binaries=()),
        Program(range=span(33, 64), step="step_0", binaries=()),
    ),
    libraries: dict[str, Path] | None = None,
    custom_ops: Sequence[CustomOp] = (),
    target: Target | None = None,
    kv_cache: KVCacheSpec | None = None,
    cudagraph: CudagraphSpec | None = None,
    pieces: dict[str, tuple[Piece, ...]] | None = None,
    results: Sequence[Tensor] = (),
    ranks: Sequence[Rank] = (Rank(rank=0, data_parallel_rank=0, world_size=1, files={}),),
) -> Path:
    """An artifact in `folder`."""
    constants = {"bias": torch.tensor([1.0, 2.0, 3.0, 4.0])} if constants is None else constants
    libraries = libraries or {}
    written = {}
    for rank in ranks:
        name = f"rank_{rank.rank}_{rank.data_parallel_rank}"
        (folder / name / "inductor").mkdir(parents=True)
        (folder / name / "transformed_code.py").write_text(code)
        if constants:
            safetensors.torch.save_file(constants, folder / name / "constants.safetensors")
        for key, library in libraries.items():
            shutil.copy(library, folder / name / "inductor" / f"{key}.so")
        files = {
            str(path.relative_to(folder)): File(
                bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
            )
            for path in sorted((folder / name).rglob("*"))
            if path.is_file()
        }
        written[name] = Rank(
            rank=rank.rank, data_parallel_rank=rank.data_parallel_rank, world_size=rank.world_size, files=files
        )
    manifest = Manifest(
        hash=hashlib.sha256(str(sorted(written)).encode()).hexdigest()[:32],
        fxc="0",
        created="2026-01-01T00:00:00Z",
        model="Tiny",
        spec=Spec(
            model=ModelSpec(target="tiny.py:Tiny"),
            device="cpu",
            kv_cache=kv_cache,
            cudagraph=cudagraph or CudagraphSpec(),
            dims={name: DimSpec(min=low, max=high) for name, (low, high) in whole([p.range for p in programs]).items()},
        ),
        target=target or machine.probe("cpu"),
        factors=(),
        inputs=tuple(inputs),
        outputs="out",
        weights=tuple(weights),
        constants=tuple(
            Constant(name=name, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))
            for name, value in constants.items()
        ),
        programs=tuple(programs),
        pieces=pieces or {},
        results=tuple(results),
        binaries={
            key: Binary(piece="0", range="", bytes=1, sha256="", seconds=0.0)
            for program in programs
            for key in program.binaries
        },
        custom_ops=tuple(custom_ops),
        ranks=written,
    )
    (folder / "manifest.json").write_bytes(encode(manifest))
    return folder
