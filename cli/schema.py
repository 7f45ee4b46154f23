"""`fxc schema`: the JSON schema of model.yaml."""

from __future__ import annotations

from fxc.cli import render
from fxc.cli.options import CacheDir, Json, Quiet, Verbose
from fxc.spec import json_schema


def run(cache_dir: CacheDir = None, json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Print the JSON schema of model.yaml, for editors."""
    render.json_object(json_schema())
