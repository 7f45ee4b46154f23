"""A benchmark's result, written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from fxc.bench import BenchResult, Captured, Measured
from fxc.timing import Timing

NO_GPU = "CUDA graphs want a GPU, and this program runs on the CPU"


def timing(step: float, host: float | None = None) -> Timing:
    """Quartiles lie a tenth around the step."""
    return Timing(step_us=step, low_us=0.9 * step, high_us=1.1 * step, host_us=step if host is None else host)


def size(
    tokens: int, times: Mapping[str, Timing], missing: Mapping[str, str] | None = None, *, own: bool = True,
    roofline: float | None = None, padding: Mapping[str, int] | None = None, requests: bool = False,
) -> Measured:  # fmt: skip
    return Measured(
        size={"num_tokens": tokens, **({"num_requests": tokens} if requests else {})}, tokens=tokens,
        served_by=f"num_tokens={tokens}" if own else "num_tokens=1..64", own=own, bytes_read=1_000_000,
        roofline_us=roofline, padding=dict(padding or {}), times=dict(times), errors=dict.fromkeys(times, 0.0),
        missing=dict(missing or {}),
    )  # fmt: skip


def on_cpu() -> BenchResult:
    missing = {"piecewise": NO_GPU, "full": NO_GPU}
    return BenchResult(
        hash="abcd" + "0" * 28, model="Tiny", device="cpu", torch="2.13.0+cpu", threads=2, repeats=20, context=None,
        bandwidth=None, weights=11_500_000, cache=0, variants=["eager", "compiled", "piecewise", "full"], graphs={},
        sizes=[
            size(1, {"eager": timing(3623.4), "compiled": timing(99.96)}, missing),
            size(36, {"eager": timing(9288), "compiled": timing(5.25)}, missing, own=False),
        ],
    )  # fmt: skip


def on_gpu() -> BenchResult:
    """With `kv_cache`; 12 requests have no graph of the piecewise kind."""
    first = {"eager": timing(20000, 19000), "compiled": timing(8000, 7000), "full": timing(5000, 60)}
    second = {"eager": timing(21000, 19000), "compiled": timing(8000, 7000), "full": timing(6000, 61)}
    return BenchResult(
        hash="abcd" + "0" * 28, model="Llama", device="GPU <H>", torch="2.11.0", threads=16, repeats=5, context=1024,
        bandwidth=4e12, weights=15_000_000_000, cache=36_000_000_000, variants=["eager", "compiled", "piecewise", "full"],
        graphs={
            "piecewise": Captured([{"num_tokens": 8, "num_requests": 8}], 2_000_000, 0.25),
            "full": Captured([{"num_tokens": n, "num_requests": n} for n in (16, 8)], 3_000_000, 0.05),
        },
        sizes=[
            size(8, {**first, "piecewise": timing(6000, 2000)}, roofline=4000, padding={"piecewise": 0, "full": 0}, requests=True),
            size(12, second, {"piecewise": "no graph"}, own=False, roofline=4100, padding={"full": 4}, requests=True),
        ],
    )  # fmt: skip
