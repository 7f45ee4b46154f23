"""`fxc::attention` against attention written out in float64."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

from fxc.errors import InputError
from fxc.ops import attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One query, head and batch entry at a time."""
    flat = q.dim() == 3
    q, k, v = (t[None].double() if flat else t.double() for t in (q, k, v))
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    batch, tokens, heads, width = q.shape
    for b, i, h in itertools.product(range(batch), range(tokens), range(heads)):
        group = h // (heads // k.shape[2])
        scores = k[b, :, group] @ q[b, i, h] * (width**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        for j in range(tokens):
            hidden = (
                (causal and j > i)
                or (window is not None and abs(i - j) >= window)
                or (chunk is not None and i // chunk != j // chunk)
                or (key_mask is not None and not (key_mask if flat else key_mask[b])[j])
            )
            if hidden:
                scores[j] = -1e30
        if sinks is not None:
            scores = torch.cat((scores, sinks[h, None].double()))
        out[b, i, h] = scores.softmax(0)[:tokens] @ v[b, :, group]
    return out[0] if flat else out


def tensors(*lead: int, dtype: torch.dtype = torch.float32, value_width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(sum(lead))
    shapes = ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, value_width))
    q, k, v = (torch.randn(*lead, *shape, generator=make).to(dtype) for shape in shapes)
    return q, k, v


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"scale": 0.3},
    {"window": 1},
    {"window": 3},
    {"window": 3, "causal": False},
    {"window": 100},
    {"chunk": 4},
    {"softcap": 2.0},
    {"softcap": 2.0, "window": 3, "scale": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lead", [(1,), (2,), (9,), (2, 7)], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_equals_attention_written_out(options: dict[str, Any], lead: tuple[int, ...], sinks: bool) -> None:
    q, k, v = tensors(*lead)
    column = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    out = attention(q, k, v, None, column, **options)
    torch.testing.assert_close(out.double(), reference(q, k, v, None, column, **options), rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize("options", [{"causal": False}, {}, {"causal": False, "window": 2}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.bool], ids=str)
def test_key_mask_hides_padding(options: dict[str, Any], kind: torch.dtype) -> None:
    q, k, v = tensors(3, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]]).to(kind)
    out = attention(q, k, v, mask, **options)
    torch.testing.assert_close(out.double(), reference(q, k, v, mask, **options), rtol=1e-5, atol=1e-5)


def test_key_mask_of_one_sequence() -> None:
    q, k, v = tensors(5)
    mask = torch.tensor([1, 1, 0, 1, 0])
    torch.testing.assert_close(attention(q, k, v, mask), attention(q[None], k[None], v[None], mask[None])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{"causal": False}, {"causal": False, "softcap": 1.0}], ids=str)
def test_query_without_keys_averages_the_values(options: dict[str, Any], dtype: torch.dtype) -> None:
    check_average(dtype, **options)


@pytest.mark.parametrize("options", [{"causal": False, "softcap": 1.0}, {"softcap": 50.0}], ids=str)
def test_query_without_keys_averages_the_values_in_float16(options: dict[str, Any]) -> None:
    check_average(torch.float16, **options)


def check_average(dtype: torch.dtype, **options: Any) -> None:
    q, k, v = tensors(1, 4, dtype=dtype)
    out = attention(q * -9, k, v, torch.zeros(1, 4, dtype=torch.bool), **options)
    expected = v.mean(1, keepdim=True).repeat_interleave(HEADS // KV_HEADS, 2).expand_as(out)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_hidden_keys_weigh_nothing_in_low_precision(dtype: torch.dtype, sinks: bool) -> None:
    """Scores of -2000 and less, where float16 has no room below."""
    q, k, v = tensors(7, dtype=dtype)
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1])
    column = torch.full((HEADS,), -2000.0, dtype=dtype) if sinks else None
    q, k = q.abs() * -30, k.abs() * 30
    out = attention(q, k, v, mask, column, softcap=2000.0)
    assert out.isfinite().all()
    if not sinks:
        torch.testing.assert_close(out[:2], v.mean(0).repeat_interleave(HEADS // KV_HEADS, 0).expand(2, -1, -1))
    else:
        assert not out[:2].any()  # the sink takes all


def test_values_may_have_another_width() -> None:
    q, k, v = tensors(6, value_width=5)
    out = attention(q, k, v)
    assert out.shape == (6, HEADS, 5)
    torch.testing.assert_close(out.double(), reference(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 3.0}], ids=str)
def test_low_precision_is_as_good_as_its_inputs(options: dict[str, Any]) -> None:
    q, k, v = tensors(11, dtype=torch.bfloat16)
    out = attention(q, k, v, **options)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), reference(q, k, v, **options), rtol=2e-2, atol=2e-2)


def test_strided_inputs_are_read_as_they_lie() -> None:
    q, k, v = tensors(6)
    fused = torch.cat((q, k, v), 1)
    parts = fused.split((HEADS, KV_HEADS, KV_HEADS), 1)
    assert not parts[0].is_contiguous()
    torch.testing.assert_close(attention(*parts), attention(q, k, v))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("q", {"q": torch.zeros(8)}, "has 1 dimensions"),
    ("k", {"k": torch.zeros(1, 5, 2, 8)}, "has 4 dimensions, expected 3"),
    ("v", {"v": torch.zeros(5, 2, 8, dtype=torch.float64)}, "torch.float64, expected torch.float32"),
    ("k", {"k": torch.zeros(5, 2, 7)}, "has width 7, expected 8"),
    ("k", {"k": torch.zeros(5, 3, 8), "v": torch.zeros(5, 3, 8)}, "has 3 heads"),
    ("v", {"v": torch.zeros(5, 1, 8)}, "has 1 heads, expected 2"),
    ("k", {"k": torch.zeros(6, 2, 8)}, r"has shape \[6, 2, 8\]"),
    ("key_mask", {"key_mask": torch.zeros(5, 5, dtype=torch.bool)}, "has 2 dimensions"),
    ("key_mask", {"key_mask": torch.zeros(5)}, "is torch.float32"),
    ("key_mask", {"key_mask": torch.zeros(4, dtype=torch.bool)}, r"has shape \[4\], expected \[5\]"),
    ("sinks", {"sinks": torch.zeros(2)}, r"has shape \[2\], expected \[4\]"),
    ("window", {"window": 0}, "is 0"),
    ("chunk", {"chunk": -1}, "is -1"),
    ("softcap", {"softcap": 0.0}, "is 0.0"),
]


@pytest.mark.parametrize(
    ("argument", "changed", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refuses_by_name(argument: str, changed: dict[str, Any], message: str) -> None:
    q, k, v = tensors(5)
    with pytest.raises(InputError, match=f"fxc::attention: {argument} .*{message}"):
        attention(**{"q": q, "k": k, "v": v, **changed})


class _Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = attention(q * 2, k, v, mask, window=3, causal=False)
        return out + 1


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch.export's own
@pytest.mark.parametrize("strict", [False, True])
def test_stays_one_node_with_symbolic_sizes(strict: bool) -> None:
    batch, seq = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("seq", min=1, max=64)
    q, k, v = tensors(3, 13, value_width=5)
    mask = torch.ones(3, 13, dtype=torch.int64)
    with torch.no_grad():
        program = torch.export.export(
            _Layer(), (q, k, v, mask), dynamic_shapes=({0: batch, 1: seq},) * 4, strict=strict
        )
    program = program.run_decompositions()
    nodes = [node for node in program.graph.nodes if node.target is attention]
    assert len(nodes) == 1
    assert [str(size) for size in nodes[0].meta["val"].shape[2:]] == ["4", "5"]
    for sizes in ((1, 1), (2, 2), (1, 40)):
        args = (*tensors(*sizes, value_width=5), torch.ones(sizes, dtype=torch.int64))
        torch.testing.assert_close(program.graph_module(*args)[0], _Layer()(*args))


def test_schema_and_fake_agree_with_what_it_does() -> None:
    q, k, v = tensors(2, 6, value_width=5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention, (q, k, v, torch.ones(2, 6, dtype=torch.bool)), {"window": 2}, test_utils=checks)


def test_importing_and_calling_needs_torch_alone() -> None:
    code = """
        import sys
        import torch
        from fxc.ops import attention
        q = torch.randn(5, 4, 8)
        with torch.no_grad():
            attention(q, q, q)
            attention(q, q, q, torch.ones(5, dtype=torch.bool), torch.zeros(4), window=2, softcap=3.0)
        unwanted = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers")
        print([name for name in unwanted if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lead", [(1,), (40,), (3, 70)], ids=str)
def test_cuda_equals_written_out_and_can_be_captured(options: dict[str, Any], lead: tuple[int, ...]) -> None:
    q, k, v = tensors(*lead, dtype=torch.bfloat16, value_width=5)
    mask = torch.arange(lead[-1]).expand(lead) != 1
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for extra in ((None, None), (mask, None), (None, sinks)):
        expected = attention(q.double(), k.double(), v.double(), *extra, **options)
        given = [None if value is None else value.cuda() for value in (q, k, v, *extra)]
        torch.testing.assert_close(attention(*given, **options).cpu().double(), expected, rtol=3e-2, atol=3e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(*given, **options)
        graph.replay()
        torch.testing.assert_close(out.cpu().double(), expected, rtol=3e-2, atol=3e-2)
