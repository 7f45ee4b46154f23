"""`fxc sign`: an Ed25519 signature over an artifact."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fxc import refs
from fxc.cache import Cache, Trust
from fxc.cli import render, streams
from fxc.cli.options import CacheDir, Json, Quiet, Ref, Verbose


def run(
    ref: Ref,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Ed25519 private key, PEM.")],
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check every digest of an artifact and sign its manifest; prints the hash."""
    artifact = refs.find(ref, cache_dir, trust=Trust.unsigned(os.environ))
    with artifact.use():
        artifact.verify()
        signed = Cache.open(cache_dir).sign(artifact, key)
    hash = signed.manifest.hash
    if not quiet:
        render.line(f"signed {signed.path}")
    if json:
        render.json_object({"hash": hash, "path": str(signed.path), "signature": signed.signature.hex()})
    else:
        streams.write(f"{hash}\n")
