"""`fxc target`: records of GPUs that builds are made for without one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fxc import records
from fxc.cache.files import io_errors
from fxc.cli import render
from fxc.cli.options import Json, Quiet, Verbose
from fxc.records import Record

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Records of GPUs, for `fxc build --target`.")
Name = Annotated[
    str | None, typer.Argument(metavar="[NAME|FILE]", help="A shipped record, or a file; default: this machine's GPU.")
]


@app.command("show")
def show(name: Name = None, json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Show a record; by default that of this machine's GPU."""
    record = records.probe() if name is None else records.find(name)
    if json:
        render.json_object(record)
        return
    rows = [("compute capability", "{}.{}".format(*record.compute_capability))]
    rows += [(key, str(value)) for key, value in record.properties.items()]
    render.table("", ("", ""), [*rows, ("source", record.source), ("tested", record.tested or "no")])


@app.command("dump")
def dump(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="Where to write it.")],
    json: Json = False, quiet: Quiet = False, verbose: Verbose = False,
) -> None:  # fmt: skip
    """Write the record of this machine's GPU into a file, for builds elsewhere."""
    record = records.probe()
    with io_errors("write", file):
        file.write_bytes(records.encode(record))
    if json:
        render.json_object({"file": str(file), "record": record})
    elif not quiet:
        render.line(f"{record.name} in {file}")


@app.command("ls")
def ls(json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the records that come with fxc."""
    shipped = records.shipped()
    if json:
        render.json_object({"targets": [_listed(name, record) for name, record in shipped.items()]})
        return
    rows = [(name, record.name, record.arch, record.tested or "no", record.source) for name, record in shipped.items()]
    render.table("", ("target", "device", "arch", "a binary has run", "source of the numbers"), rows)


def _listed(name: str, record: Record) -> dict[str, Any]:
    return {"target": name, **msgspec.to_builtins(record)}
