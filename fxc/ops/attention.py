"""`fxc::attention`: the op that graphs are cut at. Stateless, functional, contiguous result.

    q [..., tokens, heads, d]   k [..., tokens, kv_heads, d]   v [..., tokens, kv_heads, dv] -> [..., tokens, heads, dv]

Without leading dimension it is one sequence (a flat batch of tokens), with one a padded batch. Query head i reads
key/value head i // (heads // kv_heads). Key j is visible to query i when all of these hold:

    causal          j <= i
    window = w      |i - j| < w
    chunk = c       i // c == j // c
    key_mask        key_mask[..., j] is not zero

A query that sees no key averages all values, as the additive masks of eager implementations do; never NaN. In float16,
whose lowest number is -65504, SDPA's average is not an even one.

Registered through `torch.library.Library`: an op of `torch.library.custom_op` imports Dynamo at its first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fxc.errors import InputError

SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? key_mask=None, Tensor? sinks=None, *, float? scale=None, "
    "bool causal=True, int? window=None, int? chunk=None, float? softcap=None) -> Tensor"
)


def _attention(
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
    _check(q, k, v, key_mask, sinks, window=window, chunk=chunk, softcap=softcap)
    _check_sizes(q, k, v, key_mask)
    batch = q.shape[:-3]
    query, key, value = (t.transpose(-3, -2) if batch else t.transpose(-3, -2)[None] for t in (q, k, v))
    tokens = query.shape[-2]
    if window is not None and window >= tokens:
        window = None
    if chunk is not None and chunk >= tokens:
        chunk = None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is None and sinks is None:
        simple = window is None and chunk is None and key_mask is None
        mask = None if simple else _bias(query, key_mask, causal, window, chunk, query.dtype)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and simple, scale=scale, enable_gqa=True
        )
    else:
        mask = _bias(query, key_mask, causal, window, chunk, torch.promote_types(query.dtype, torch.float32))
        out = _plain(query, key, value, mask, sinks, scale, softcap)
    out = out.transpose(-3, -2)
    return (out if batch else out[0]).contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None, **options: Any) -> Tensor:
    _check(q, k, v, *more, **options)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attention written out, for what SDPA lacks: sinks as one more key, softmax in the mask's dtype.

    That is float32 at least: in float16 a hidden key's score would become -inf, and a query that sees none NaN.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(mask.dtype) + mask
    if sinks is not None:
        column = sinks.to(mask.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value


def visible(i: Tensor, j: Tensor, causal: bool, window: int | None, chunk: int | None) -> Tensor:
    """Whether query i sees key j, by position alone; i and j are index tensors that broadcast."""
    seen = j <= i if causal else (i >= 0) & (j >= 0)
    if window is not None:
        seen = seen & ((i - j).abs() < window)
    if chunk is not None:
        seen = seen & (i // chunk == j // chunk)
    return seen


def _bias(
    query: Tensor, key_mask: Tensor | None, causal: bool, window: int | None, chunk: int | None, dtype: torch.dtype
) -> Tensor:
    """What is added to the scores, [batch, 1, tokens, tokens]: 0 for a visible key, else the lowest finite number."""
    index = torch.arange(query.shape[-2], device=query.device)
    seen = visible(index[:, None], index[None, :], causal, window, chunk)[None, None]
    if key_mask is not None:
        keys = key_mask if key_mask.dim() == 2 else key_mask[None]
        seen = seen & (keys != 0)[:, None, None, :]
    bias = torch.zeros(seen.shape, dtype=dtype, device=query.device)
    return bias.masked_fill(~seen, torch.finfo(dtype).min)


def _check(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, sinks: Tensor | None = None, **options: Any
) -> None:
    """Refuse what the op does not take, by the argument's name. Static facts only: batch and tokens may be symbolic."""
    if q.dim() not in (3, 4):
        raise _refuse("q", f"has {q.dim()} dimensions", "[tokens, heads, d] or [batch, tokens, heads, d]")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != q.dim():
            raise _refuse(name, f"has {tensor.dim()} dimensions", f"{q.dim()}, as q has")
        if tensor.dtype != q.dtype:
            raise _refuse(name, f"is {tensor.dtype}", f"{q.dtype}, as q is")
    if k.shape[-1] != q.shape[-1]:
        raise _refuse("k", f"has width {k.shape[-1]}", f"{q.shape[-1]}, as q has")
    if k.shape[-2] != v.shape[-2]:
        raise _refuse("v", f"has {v.shape[-2]} heads", f"{k.shape[-2]}, as k has")
    if q.shape[-2] % k.shape[-2]:
        raise _refuse("k", f"has {k.shape[-2]} heads", f"a divisor of q's {q.shape[-2]}")
    if key_mask is not None and key_mask.dim() != q.dim() - 2:
        raise _refuse("key_mask", f"has {key_mask.dim()} dimensions", f"{q.dim() - 2}: one entry per key")
    if key_mask is not None and key_mask.is_floating_point():
        raise _refuse("key_mask", f"is {key_mask.dtype}", "bool or integers: 0 hides a key")
    if sinks is not None and tuple(sinks.shape) != (q.shape[-2],):
        raise _refuse("sinks", f"has shape {list(sinks.shape)}", f"[{q.shape[-2]}]: one per query head")
    for name in ("window", "chunk", "softcap"):
        if (value := options.get(name)) is not None and value <= 0:
            raise _refuse(name, f"is {value}", "a positive number, or none")


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """The sizes that are numbers at a call and symbols while tracing, where a comparison would become a guard."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[:-2] != q.shape[:-2]:
            raise _refuse(name, f"has shape {list(tensor.shape)}", f"{list(q.shape[:-2])} before the heads, as q has")
    if key_mask is not None and key_mask.shape != q.shape[:-2]:
        raise _refuse("key_mask", f"has shape {list(key_mask.shape)}", f"{list(q.shape[:-2])}: one entry per key")


def _refuse(argument: str, found: str, expected: str) -> InputError:
    return InputError(f"fxc::attention: {argument} {found}, expected {expected}")


_library = torch.library.Library("fxc", "DEF")
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)
# Not register_fake: it looks for its caller's source line through all modules, a quarter of the time of loading.
_library.impl("attention", _fake, "Meta")

attention = torch.ops.fxc.attention.default
