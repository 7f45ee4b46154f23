"""`fxc bench` on an NVIDIA GPU: every variant runs, gives what compiled gives, and the roofline is below them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxc.bench import GRAPHS, PEERS, bench
from tests.gpu.test_cuda import built, cache  # noqa: F401  fixtures

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_every_variant(built: Any, cache: Any) -> None:  # noqa: F811
    found = bench(built.hash, cache_dir=cache, sizes=[5, 8], peers=("torch.compile", "reduce-overhead"), repeats=3)
    assert found.device == torch.cuda.get_device_name()
    assert found.bandwidth is not None
    assert found.bandwidth > 1e11
    assert set(found.graphs) == set(GRAPHS)
    assert found.variants == ["eager", "compiled", *GRAPHS, *PEERS]
    other, captured = found.sizes
    assert captured.missing == {}
    assert set(captured.times) == set(found.variants)
    assert captured.padding == dict.fromkeys(GRAPHS, 0)
    assert set(other.times) >= {"eager", "compiled", *PEERS}
    for size in found.sizes:
        assert size.roofline_us is not None
        for name, times in size.times.items():
            assert size.roofline_us < times.step_us, name
            assert 0 < times.low_us <= times.step_us <= times.high_us
    assert captured.times["full"].host_us < captured.times["eager"].host_us


def test_without_peers(built: Any, cache: Any) -> None:  # noqa: F811
    (size,) = bench(built.hash, cache_dir=cache, sizes=[8], repeats=2).sizes
    assert set(size.times) == {"eager", "compiled", *GRAPHS}
