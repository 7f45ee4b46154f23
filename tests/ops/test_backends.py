"""Which backend computes attention for which device."""

from __future__ import annotations

import msgspec
import pytest

from fxc.ops import attention, paged_attention
from fxc.ops.backends import BACKENDS, Reference, Triton, choose
from tests.building import target


@pytest.mark.parametrize(
    ("device", "capability", "paged"),
    [("cpu", None, "reference"), ("cuda", (7, 5), "reference"), ("cuda", (8, 0), "triton"), ("cuda", (9, 0), "triton")],
)
def test_the_first_that_supports_the_device(device: str, capability: tuple[int, int] | None, paged: str) -> None:
    here = msgspec.structs.replace(target(), device=device, compute_capability=capability)
    found = {op: backend.name for op, backend in choose(here).items()}
    assert found == {paged_attention: paged, attention: "sdpa"}


def test_reasons() -> None:
    here = msgspec.structs.replace(target(), device="cuda", compute_capability=(7, 5))
    assert Triton().refuses(here) == "wants compute capability 8.0 or later, this is 7.5"
    assert Triton().refuses(target()) == "has no kernels for cpu"
    assert [backend.refuses(here) for backend in BACKENDS[1:]] == ["", ""]


def test_what_a_backend_brings() -> None:
    here = msgspec.structs.replace(
        target(), device="cuda", compute_capability=(9, 0), properties={"multi_processor_count": 132}
    )
    assert set(Triton().compiled) == {"fxc::attention.paged"}
    assert Reference().kernels(here) == {}
