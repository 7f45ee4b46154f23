"""Which graph serves which batch."""

from __future__ import annotations

import pytest

from fxc.runtime.choice import BatchDescriptor, Captured, Choice, choose

FULL = (8, 4, 2, 1)
PIECEWISE = (16, 8, 4)
PAGED = Captured(
    {
        "full": tuple({"num_tokens": n, "num_requests": n} for n in FULL),
        "piecewise": tuple({"num_tokens": n} for n in PIECEWISE),
    }
)


def paged(tokens: int, requests: int, captured: Captured = PAGED) -> Choice:
    return choose(BatchDescriptor({"num_tokens": tokens, "num_requests": requests}), captured)


def test_a_descriptor() -> None:
    batch = BatchDescriptor({"num_requests": 3, "num_tokens": 3})
    assert (batch.num_tokens, batch.num_requests, batch.uniform_decode) == (3, 3, True)
    batch = BatchDescriptor({"num_tokens": 4, "num_requests": 3})
    assert not batch.uniform_decode
    batch = BatchDescriptor({"batch": 2, "seq": 7})
    assert (batch.num_tokens, batch.num_requests, batch.uniform_decode) == (2, None, False)
    assert BatchDescriptor({}).num_tokens == 1


@pytest.mark.parametrize("n", range(1, 18))
def test_decoding(n: int) -> None:
    """Full graphs up to the largest, piecewise ones above, then none."""
    found = paged(n, n)
    full = min((size for size in FULL if size >= n), default=None)
    piecewise = min((size for size in PIECEWISE if size >= n), default=None)
    if full is not None:
        assert (found.mode, found.size) == ("full", {"num_tokens": full, "num_requests": full})
        assert found.padding == full - n
    elif piecewise is not None:
        assert (found.mode, found.size, found.padding) == ("piecewise", {"num_tokens": piecewise}, piecewise - n)
    else:
        assert found == Choice("compiled", {}, 0, "larger than any full graph; larger than any piecewise graph")


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("tokens", range(4, 18))
def test_prompts_are_not_padded_to_graphs_of_decoding(tokens: int, requests: int) -> None:
    found = paged(tokens, requests)
    size = min((size for size in PIECEWISE if size >= tokens), default=None)
    assert found.size == ({} if size is None else {"num_tokens": size})
    assert found.mode == ("compiled" if size is None else "piecewise")


def test_a_mixed_batch_is_padded_to_a_full_graph_of_mixed_batches() -> None:
    captured = Captured({"full": ({"num_tokens": 8, "num_requests": 8}, {"num_tokens": 16, "num_requests": 4})})
    assert paged(7, 2, captured).size == {"num_tokens": 16, "num_requests": 4}
    assert paged(7, 5, captured) == Choice(
        "compiled", {}, 0, "full graphs of one token per request are for decoding alone; no piecewise graph is captured"
    )
    assert paged(4, 4, captured).size == {"num_tokens": 8, "num_requests": 8}


@pytest.mark.parametrize("n", range(1, 10))
def test_one_dimension(n: int) -> None:
    found = choose(BatchDescriptor({"n": n}), Captured({"full": ({"n": 8}, {"n": 3})}))
    assert (found.mode, found.size.get("n"), found.padding) == (
        ("full", 3 if n <= 3 else 8, (3 if n <= 3 else 8) - n) if n <= 8 else ("compiled", None, 0)
    )


def test_the_smallest_that_holds_both_dimensions() -> None:
    sizes = ({"batch": 4, "seq": 128}, {"batch": 1, "seq": 256}, {"batch": 8, "seq": 16})
    captured = Captured({"full": sizes})
    assert choose(BatchDescriptor({"batch": 1, "seq": 100}), captured).size == {"batch": 1, "seq": 256}
    assert choose(BatchDescriptor({"batch": 2, "seq": 100}), captured).size == {"batch": 4, "seq": 128}
    assert choose(BatchDescriptor({"batch": 2, "seq": 9}), captured) == Choice(
        "full", {"batch": 8, "seq": 16}, 6, "padded from batch=2,seq=9"
    )


def test_what_cannot_be_padded_needs_its_very_size() -> None:
    captured = Captured({"full": ({"n": 8},)}, {"full": "model.yaml does not say what to pad x with"})
    assert choose(BatchDescriptor({"n": 8}), captured) == Choice("full", {"n": 8}, 0, "captured at these sizes")
    found = choose(BatchDescriptor({"n": 7}), captured)
    assert str(found) == (
        "compiled: no full graph of these sizes, and model.yaml does not say what to pad x with; "
        "no piecewise graph is captured"
    )


def test_why_there_is_no_graph() -> None:
    captured = Captured({"piecewise": ({"n": 8},)}, {}, {"full": "n=8 cannot be captured at line 3"})
    assert choose(BatchDescriptor({"n": 9}), captured).why == (
        "n=8 cannot be captured at line 3; larger than any piecewise graph"
    )
    assert str(choose(BatchDescriptor({"n": 5}), captured)) == "piecewise n=8: padded from n=5"


def test_a_static_program() -> None:
    captured = Captured({"full": ({},)})
    assert choose(BatchDescriptor({}), captured) == Choice("full", {}, 0, "captured at these sizes")
