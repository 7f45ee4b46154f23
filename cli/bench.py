"""`fxc bench`: how fast a built program is, beside eager, its CUDA graphs and torch.compile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from fxc.cli import bench_table, output_file, plot, progress, render, streams
from fxc.cli.options import CacheDir, Json, Quiet, Ref, Verbose
from fxc.errors import UsageError

EPILOG = """\
Eager is the graph that was traced, run op by op, and torch.compile gets the same graph, each size for itself; attention
is the same op in all of them. Every result is compared with compiled before it is timed. Step is the median time of a
call, device included; host is the time until it returns. The roofline of a size is the bytes that it has to read over
the bandwidth of a copy in the same run (GPU only): all weights, but of a table that only embeddings look up a row for
each token, and of paged caches the keys and values of each request's tokens. Not counted are constants, activations and
other bound inputs; of experts and of caches behind a sliding window more is counted than may be read."""


def run(
    ref: Ref,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--sizes",
            metavar="1,8,64",
            help="Sizes, or one by name: batch=1,tokens=128. Repeatable. Default: the program's, and one not compiled.",
        ),
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Time torch.compile too, and its reduce-overhead.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Samples of each time.")] = 20,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            min=0,
            help="With kv_cache: tokens of each request in the cache. Default: 1024, or what fits.",
        ),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Draw latency and tokens per second against size."),
    ] = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Time each size: eager, compiled, and with CUDA graphs, in one run. Never builds."""
    wanted = None if sizes is None else [*read_sizes(sizes)]
    if chart == output_file.STDOUT and json:
        raise UsageError("--json and --plot - print different things to stdout", "give one of them")
    if chart is not None:
        output_file.check(chart, "--plot")
    from fxc.bench import PEERS, bench

    with streams.result_only(), progress.observer(quiet=quiet, verbose=verbose) as observer:
        result = bench(
            ref,
            sizes=wanted,
            peers=[*PEERS] if peers else (),
            repeats=repeats,
            context=context,
            cache_dir=cache_dir,
            observer=observer,
        )
    if chart is not None:
        output_file.write(chart, plot.svg(result), "--plot")
    if json:
        render.json_object(result)
    elif not quiet:
        bench_table.show(result)


def read_sizes(words: Iterable[str]) -> Iterator[int | dict[str, int]]:
    """`1,8` is two sizes; `batch=1,tokens=8` is one.

    Raises:
        UsageError: neither.
    """
    for word in words:
        parts = [part.strip().partition("=") for part in word.split(",")]
        values = [value if equals else name for name, equals, value in parts]
        if not all(value.isdecimal() for value in values) or len({equals for _, equals, _ in parts}) > 1:
            hint = "write numbers, 1,8,64, or a value of each dimension, batch=1,tokens=128"
            raise UsageError(f"--sizes {word!r} is no list of sizes", hint)
        if parts[0][1]:
            yield {name.strip(): int(value) for name, _, value in parts}
        else:
            yield from map(int, values)
