"""`fxc::attention.paged`: attention of a flat batch of many requests' new tokens over a paged key/value cache.

    q [tokens, heads, d]   k_cache [blocks, block_size, kv_heads, d]   v_cache [blocks, block_size, kv_heads, dv]
    block_table int32 [requests, max_blocks]: the blocks of each request, in order
    seq_lens int32 [requests]: keys of each request, its new tokens included; 0 for a pad request
    query_starts int32 [requests + 1]: request r has the tokens query_starts[r] to query_starts[r + 1]; the first is 0
    -> [tokens, heads, dv]

The new tokens' keys and values are in the cache already (`fxc::kv_write`). Query i of n of a request stands at position
seq_len - n + i and sees the keys up to its own, and of these what `fxc::attention` documents for window, chunk and
sinks. Tokens of no request and of pad requests come out as zeros. Blocks that no query sees are not read.

With `output_scale`, float32 of one element, the result is clamp(y / output_scale, -448, 448) in float8_e4m3fn, or
y * output_scale with `output_inverse`, of the y in float32; NaN stays NaN.

`attention.paged_out` writes the result into its last argument and returns nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxc.errors import InputError
from fxc.ops.attention import visible

ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor query_starts, "
    "Tensor? sinks=None, Tensor? output_scale=None, *, float? scale=None, int? window=None, int? chunk=None, "
    "float? softcap=None, bool output_inverse=False"
)

SHAPES = {
    "q": "[tokens, heads, d]",
    "k_cache": "[blocks, block_size, kv_heads, d]",
    "v_cache": "[blocks, block_size, kv_heads, dv]",
    "block_table": "[requests, max_blocks]",
    "seq_lens": "[requests]",
    "query_starts": "[requests + 1]",
}
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of it."""


def reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, *more: Any, **options: Any) -> Tensor:
    """The op on the CPU; right on any device."""
    out = empty(q, v_cache, *more[4:5], **options)
    reference_out(q, k_cache, v_cache, *more, out=out, **options)
    return out


def empty(q: Tensor, v_cache: Tensor, output_scale: Tensor | None = None, **_: Any) -> Tensor:
    """Memory for the result."""
    kind = q.dtype if output_scale is None else FP8
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]), dtype=kind)


def reference_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    output_inverse: bool = False,
    out: Tensor,
) -> None:
    """Plain and right: request by request, softmax in float32 or better."""
    options = {"scale": scale, "window": window, "chunk": chunk, "softcap": softcap, "out": out}
    check(q, k_cache, v_cache, block_table, seq_lens, query_starts, sinks, output_scale, **options)  # type: ignore[arg-type]
    _check_sizes(q, block_table, seq_lens, query_starts, out)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    out.zero_()
    for request, length in enumerate(lengths):
        begin, end = starts[request : request + 2]
        if length and end > begin:
            position = torch.arange(length - (end - begin), length, device=q.device)
            first = _first(int(position[0]), window, chunk) // k_cache.shape[1] * k_cache.shape[1]
            blocks = block_table[request, first // k_cache.shape[1] : -(-length // k_cache.shape[1])].long()
            key, value = (cache[blocks].flatten(0, 1)[: length - first] for cache in (k_cache, v_cache))
            seen = visible(position[:, None], torch.arange(first, length, device=q.device), True, window, chunk)
            mixed = _one(q[begin:end], key, value, seen, sinks, scale, softcap)
            out[begin:end] = _rounded(mixed, output_scale, output_inverse).to(out.dtype)


def make_up(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths: Tensor, starts: Tensor) -> None:
    """Fill block table, lengths and starts with values that mean something: for proofs, on random q and caches.

    Tokens are shared out evenly, up to `MADE_UP_QUERIES` for each request; what is left belongs to no request. Each
    request has some keys that came before.
    """
    tokens, requests = q.shape[0], lengths.shape[0]
    most = block_table.shape[1] * k_cache.shape[1]
    generator = torch.Generator().manual_seed(tokens + requests)
    shares = [tokens // requests + (index < tokens % requests) for index in range(requests)]
    queries = torch.tensor([min(share, most, MADE_UP_QUERIES) for share in shares])
    before = (torch.rand(requests, generator=generator) * (most - queries + 1)).long().clamp(max=4 * MADE_UP_QUERIES)
    lengths.copy_(torch.where(queries > 0, queries + before, 0))
    starts.copy_(torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]))
    block_table.copy_(torch.randint(k_cache.shape[0], block_table.shape, generator=generator))


MADE_UP_QUERIES = 512
"""The reference holds all scores of a request at once."""


def _one(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attention of one request, [queries, heads, dv]; `seen` is [queries, keys]."""
    kind = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    key, value = (t.to(kind).repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(kind) * scale, key)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(kind)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1).nan_to_num(0.0)  # NaN where there is no key at all
    # What nobody sees may be NaN, and 0 * NaN is NaN.
    value = value.masked_fill(~seen.any(0)[:, None, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights[..., : k.shape[0]], value)


def _rounded(y: Tensor, scale: Tensor | None, inverse: bool) -> Tensor:
    """What is rounded to the result."""
    if scale is None:
        return y
    return (y * scale if inverse else y / scale).clamp(-LARGEST, LARGEST)


def _first(position: int, window: int | None, chunk: int | None) -> int:
    """The first key that the query at `position` sees."""
    low = max(0, position)
    return max(0 if window is None else low - window + 1, 0 if chunk is None else low // chunk * chunk, 0)


def _paged_cuda(q: Tensor, *more: Any, out: Tensor | None = None, **options: Any) -> Tensor:
    check(q, *more, out=out, **options)
    _, _, table, lengths, starts = more[:5]
    _check_sizes(q, table, lengths, starts, out)
    from fxc.ops import paged_triton

    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    return paged_triton.attend(q, *more, out=out, sms=sms, **options)


def _paged_out_cuda(*args: Any, out: Tensor, **options: Any) -> None:
    _paged_cuda(*args, out=out, **options)


def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *more: Any, **options: Any) -> Tensor:
    check(q, k_cache, v_cache, *more, **options)
    return empty(q, v_cache, *more[4:5], **options)


def _fake_out(*args: Any, out: Tensor, **options: Any) -> None:
    check(*args, out=out, **options)


def check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    output_inverse: bool = False,
    out: Tensor | None = None,
) -> None:
    """Refuse what the op does not take, by the argument's name. Static facts only: most sizes may be symbolic."""
    caches = (("k_cache", k_cache), ("v_cache", v_cache))
    lists = (("block_table", block_table), ("seq_lens", seq_lens), ("query_starts", query_starts))
    for name, tensor in (("q", q), *caches, *lists):
        if tensor.dim() != SHAPES[name].count(",") + 1:
            raise _refuse(name, f"has {tensor.dim()} dimensions", SHAPES[name])
    for name, tensor in lists:
        if tensor.dtype != torch.int32:
            raise _refuse(name, f"is {tensor.dtype}", "torch.int32")
        if tensor.stride(-1) != 1:
            raise _refuse(name, f"has stride {tensor.stride(-1)} in its last dimension", "1")
    kind = q.dtype if output_scale is None else FP8
    if out is not None and out.dtype != kind:
        raise _refuse("out", f"is {out.dtype}", str(kind) if output_scale is not None else f"{kind}, as q is")
    for name, tensor in (*caches, *((("out", out),) if out is not None else ())):
        if tensor.dtype != q.dtype and tensor is not out:
            raise _refuse(name, f"is {tensor.dtype}", f"{q.dtype}, as q is")
        if tensor.stride(-1) != 1:
            raise _refuse(name, f"has stride {tensor.stride(-1)} in its last dimension", "1")
    if not q.is_floating_point():
        raise _refuse("q", f"is {q.dtype}", "a floating point type")
    if k_cache.shape[-1] != q.shape[-1]:
        raise _refuse("k_cache", f"has width {k_cache.shape[-1]}", f"{q.shape[-1]}, as q has")
    for axis, what in ((2, "heads"), (1, "slots in a block")):
        if v_cache.shape[axis] != k_cache.shape[axis]:
            raise _refuse("v_cache", f"has {v_cache.shape[axis]} {what}", f"{k_cache.shape[axis]}, as k_cache has")
    if q.shape[-2] % k_cache.shape[-2]:
        raise _refuse("k_cache", f"has {k_cache.shape[-2]} heads", f"a divisor of q's {q.shape[-2]}")
    if out is not None and tuple(out.shape[1:]) != (q.shape[1], v_cache.shape[3]):
        raise _refuse("out", f"has shape {list(out.shape)}", f"[tokens, {q.shape[1]}, {v_cache.shape[3]}]")
    if sinks is not None and tuple(sinks.shape) != (q.shape[-2],):
        raise _refuse("sinks", f"has shape {list(sinks.shape)}", f"[{q.shape[-2]}]: one per query head")
    if output_scale is not None and (output_scale.dtype != torch.float32 or output_scale.numel() != 1):
        found = f"is {output_scale.dtype}{list(output_scale.shape)}"
        raise _refuse("output_scale", found, "one torch.float32")
    for name, value in (("scale", scale), ("window", window), ("chunk", chunk), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise _refuse(name, f"is {value}", "a positive number, or none")


def _check_sizes(q: Tensor, block_table: Tensor, seq_lens: Tensor, query_starts: Tensor, out: Tensor | None) -> None:
    """The sizes that are numbers at a call and symbols while tracing, where a comparison would become a guard."""
    if block_table.shape[0] != seq_lens.shape[0]:
        raise _refuse("block_table", f"has {block_table.shape[0]} rows", f"{seq_lens.shape[0]}, as seq_lens has")
    if query_starts.shape[0] != seq_lens.shape[0] + 1:
        raise _refuse(
            "query_starts", f"has {query_starts.shape[0]} entries", f"{seq_lens.shape[0] + 1}, one per request and one"
        )
    if out is not None and out.shape[0] != q.shape[0]:
        raise _refuse("out", f"has {out.shape[0]} tokens", f"{q.shape[0]}, as q has")


def _refuse(argument: str, found: str, expected: str) -> InputError:
    return InputError(f"fxc::attention.paged: {argument} {found}, expected {expected}")


_library = torch.library.Library("fxc", "FRAGMENT")
for _name, _schema in (
    ("attention.paged", f"({ARGUMENTS}) -> Tensor"),
    ("attention.paged_out", f"({ARGUMENTS}, Tensor(a!) out) -> ()"),
):
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("attention.paged", reference, "CPU")
_library.impl("attention.paged_out", reference_out, "CPU")
_library.impl("attention.paged", _paged_cuda, "CUDA")
_library.impl("attention.paged_out", _paged_out_cuda, "CUDA")
# Not register_fake: see attention.py.
_library.impl("attention.paged", _fake, "Meta")
_library.impl("attention.paged_out", _fake_out, "Meta")

paged_attention = torch.ops.fxc.attention.paged
paged_attention_out = torch.ops.fxc.attention.paged_out
