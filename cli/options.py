"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxc.errors import UsageError

Ref = Annotated[
    str, typer.Argument(metavar="MODEL.YAML|HASH", help="A hash, an artifact's path, or a model.yaml as it was built.")
]
CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", metavar="DIR", help="Cache, over FXC_CACHE_DIR and the user's cache folder."),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more; a traceback with an error.")]

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of model.yaml, compile.sizes=[1,8]. Repeatable."),
]
Level = Annotated[
    int | None,
    typer.Option("-O", metavar="0..3", min=0, max=3, help="0 eager, 1 general program, 2 sizes too, 3 sizes tuned."),
]
Jobs = Annotated[int | None, typer.Option("--jobs", metavar="N", min=1, help="Compiler processes; default: the cores.")]
Executor = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="local|ray[:ADDRESS]",
        help="Where it is compiled: ray, ray:auto, ray:HOST:PORT, ray://HOST:PORT.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", metavar="NAME|FILE", help="Build for a GPU that is not here: see `fxc target ls`."),
]
March = Annotated[
    str | None,
    typer.Option("--march", metavar="LEVEL", help="x86-64 level of host code around a GPU; default: x86-64-v3."),
]
Tuning = Annotated[
    str, typer.Option("--tuning", metavar="FILE|auto|none", help="Record of `fxc tune`; default: the cache's own.")
]
RankOption = Annotated[
    int | None,
    typer.Option("--rank", metavar="R", min=0, help="Global rank; default: RANK or 0. Above 0 it needs a world size."),
]
WorldSize = Annotated[
    int | None, typer.Option("--world-size", metavar="W", min=1, help="Processes of the job; default: WORLD_SIZE or 1.")
]
DpRank = Annotated[int | None, typer.Option("--dp-rank", metavar="D", min=0, help="Data-parallel rank; default: 0.")]


VerifyKey = Annotated[
    Path | None,
    typer.Option("--verify-key", metavar="FILE", help="Refuse what is not signed with this public key."),
]


RemoteOption = Annotated[
    str | None,
    typer.Option("--remote", metavar="URL", help="Remote cache, s3://..., gs://..., a folder; over FXC_REMOTE."),
]


def check_rank(rank: int | None, world_size: int | None) -> None:
    """Refuse a rank outside its world, as far as the command line says both.

    Raises:
        UsageError: names both numbers.
    """
    if rank is not None and world_size is not None and rank >= world_size:
        raise UsageError(f"--rank {rank} is outside a world of {world_size}", f"ranks are 0 to {world_size - 1}")
