"""The tables of a benchmark, and what is said below them."""

from __future__ import annotations

import pytest

from fxc.cli import bench_table
from tests.benched import NO_GPU, on_cpu, on_gpu, timing


def test_on_the_cpu() -> None:
    result = on_cpu()
    assert bench_table.headline(result) == "Tiny on cpu, torch 2.13.0, 2 threads: median of 20, 11.5 MB of weights"
    assert bench_table.step_table(result) == (
        ["num_tokens", "eager", "compiled", "piecewise", "full", "spread"],
        [["1", "3623", "100", "-", "-", "±10%"], ["36", "9288", "5.25", "-", "-", "±10%"]],
    )
    assert [*bench_table.notes(result)] == [
        "36: no program of its own, served by num_tokens=1..64",
        f"piecewise, full: {NO_GPU}",
    ]


def test_on_a_gpu() -> None:
    result = on_gpu()
    assert bench_table.headline(result) == (
        "Llama on GPU <H>, torch 2.11.0: median of 5, 15.0 GB of weights, context 1024, 36.0 GB of caches, "
        "a copy moves 4000.0 GB/s"
    )
    assert bench_table.step_table(result) == (
        ["requests", "eager", "compiled", "piecewise", "full", "spread", "padding", "roofline"],
        [
            ["8", "20000", "8000", "6000", "5000", "±10%", "0", "4000"],
            ["12", "21000", "8000", "-", "6000", "±10%", "4", "4100"],
        ],
    )
    assert bench_table.host_table(result) == (
        ["requests", "eager", "compiled", "piecewise", "full"],
        [["8", "19000", "7000", "2000", "60"], ["12", "19000", "7000", "-", "61"]],
    )
    assert bench_table.graph_table(result) == (
        ["mode", "sizes", "memory", "captured in"],
        [["piecewise", "1", "2 MB", "0.2 s"], ["full", "2", "3 MB", "50.0 ms"]],
    )
    assert [*bench_table.notes(result)] == [
        "12: no program of its own, served by num_tokens=1..64",
        "piecewise at 12: no graph",
    ]


def test_all_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    bench_table.show(on_cpu())
    assert "host, µs" not in capfd.readouterr().err  # it is the step
    bench_table.show(on_gpu())
    told = capfd.readouterr()
    assert told.out == ""
    assert [line for line in told.err.splitlines() if line in ("step, µs", "host, µs", "graphs")] == [
        "step, µs",
        "host, µs",
        "graphs",
    ]


@pytest.mark.parametrize(("value", "shown"), [(0.5, "0.5"), (5.254, "5.25"), (99.96, "100"), (12345.6, "12346")])
def test_micro(value: float, shown: str) -> None:
    assert bench_table.micro(value) == shown


def test_spread_is_that_of_the_worst() -> None:
    assert bench_table.spread([]) == 0
    assert bench_table.spread([timing(10), timing(1000)]) == pytest.approx(0.1)
