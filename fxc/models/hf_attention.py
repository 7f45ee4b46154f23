"""Attention of transformers models, routed to `fxc::attention`.

Before a model is traced it runs once on the meta device, under an attention implementation that only looks. Where the
model would build a mask it is handed a `Pattern` instead: who sees whom, read off the model's own mask function. What
arrives at an attention layer then says how that layer must call the op, and stays on the layer for the trace. A class
that ignores the interface is found because it never calls it, or because it tries to compute with a Pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxc.errors import TraceError
from fxc.models.target import describe
from fxc.ops.attention import attention, visible
from fxc.ops.kv_write import kv_write
from fxc.ops.paged import paged_attention

PROBE = "fxc_probe"
CAUSAL = "fxc_causal"
PADDED = "fxc_padded"
PAGED = "fxc_paged"
"""Names of attention implementations: to look, for a flat sequence (builds no mask), for a batch with a key mask, for
the tokens of many requests with keys and values in blocks."""

PATTERN = "fxc_pattern"
INDEX = "fxc_index"
"""Attributes of an attention layer."""

TAKEN = frozenset({"scaling", "softcap", "s_aux", "sliding_window"})
"""Keyword arguments of attention functions that the op serves; windows are read off the masks."""
IGNORED = frozenset({"position_ids", "cache_position"})
"""Tensors that layers pass along and no stock attention function reads."""


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees, as the op's arguments."""

    causal: bool
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class KeyValue:
    """What an attention layer keeps of each token."""

    heads: int
    width: int
    value_width: int
    dtype: str


@dataclass(frozen=True)
class Paged:
    """Inputs of `fxc::attention.paged`, for all layers."""

    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    k_caches: Sequence[Tensor]
    v_caches: Sequence[Tensor]


_paged: ContextVar[Paged] = ContextVar("fxc_paged")


@contextmanager
def paged(inputs: Paged) -> Iterator[None]:
    """For one forward of a model whose attention is `PAGED`."""
    token = _paged.set(inputs)
    try:
        yield
    finally:
        _paged.reset(token)


def register() -> None:
    """Make the implementations known to transformers. Harmless when repeated."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _look)
    AttentionInterface.register(CAUSAL, _attend)
    AttentionInterface.register(PADDED, _attend)
    AttentionInterface.register(PAGED, _attend_paged)
    AttentionMaskInterface.register(PROBE, _read_mask)
    AttentionMaskInterface.register(PADDED, _key_mask)


def route(module: nn.Module, causal: bool, *, paged: bool = False) -> list[KeyValue]:
    """Find out how each attention layer attends, and make it call the op from now on.

    Returns what each attention layer keeps of a token, in the order in which they run.

    Raises:
        TraceError: a layer has its own attention, or one that the op does not serve.
    """
    name = type(module).__name__
    _seen.clear()
    try:
        with torch.no_grad():
            _run_on_meta(module, causal)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"{name} does not run with its attention routed to fxc::attention: {describe(error)}",
            "a class with an attention of its own is not supported",
        ) from error
    if not _seen:
        raise TraceError(f"{name} has its own attention: it never calls the attention interface of transformers")
    for index, (layer, pattern, _) in enumerate(_seen):
        if pattern.causal is not causal:
            raise TraceError(
                f"{name}: {type(layer).__name__} is {'not ' if causal else ''}causal, expected the opposite"
            )
        if getattr(layer, PATTERN, pattern) != pattern:
            raise TraceError(f"{name}: {type(layer).__name__} is called with different masks: {pattern}")
        setattr(layer, PATTERN, pattern)
        setattr(layer, INDEX, index)
    for layer in _own_attention(module):
        raise TraceError(
            f"{name}: {type(layer).__name__} has its own attention, which cannot be routed to fxc::attention"
        )
    kinds = set(getattr(getattr(module, "config", None), "layer_types", None) or ())
    if paged and (getattr(module, "_is_stateful", False) or any("attention" not in k or "linear" in k for k in kinds)):
        raise TraceError(f"{name} has layers with a state of another kind than keys and values", "remove kv_cache")
    kept = [layout for _, _, layout in _seen]
    if paged and len({id(layer) for layer, _, _ in _seen}) < len(_seen):
        raise TraceError(f"{name} calls an attention layer twice, which would share one key/value cache")
    _seen.clear()
    module.set_attn_implementation(PAGED if paged else CAUSAL if causal else PADDED)  # type: ignore[operator]
    return kept


_seen: list[tuple[nn.Module, Pattern, KeyValue]] = []
"""What `_look` saw: each call of an attention layer."""


def _own_attention(module: nn.Module) -> Iterator[nn.Module]:
    """Layers that call themselves attention and did not call the op: they may see whom they like."""
    seen = {id(layer) for layer, _, _ in _seen}
    for layer in module.modules():
        inner = list(layer.modules())
        named = [part for part in inner if "Attention" in type(part).__name__]
        if named == [layer] and not any(id(part) in seen for part in inner):
            yield layer


def _run_on_meta(module: nn.Module, causal: bool) -> None:
    """One forward in which nothing is computed. With a key mask: else transformers looks for packed sequences."""
    values = {key: value.to("meta") for key, value in (*module.named_parameters(), *module.named_buffers())}
    tokens = torch.ones(1, 3, dtype=torch.int64, device="meta")
    arguments: dict[str, Any] = {"input_ids": tokens, "attention_mask": tokens}
    if causal:
        arguments |= {"position_ids": tokens, "use_cache": False}
    torch.func.functional_call(module, values, (), arguments)


def _look(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function of the run on the meta device."""
    _options(module, kwargs)
    if not isinstance(attention_mask, Pattern):
        what = "no mask" if attention_mask is None else f"a mask of its own ({type(attention_mask).__name__})"
        raise TraceError(f"{type(module).__name__} attends with {what}: fxc cannot tell who sees whom")
    kept = KeyValue(key.shape[1], key.shape[-1], value.shape[-1], str(key.dtype).removeprefix("torch."))
    _seen.append((module, attention_mask, kept))
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function that is traced: [batch, heads, tokens, d] in, [batch, tokens, heads, dv] out."""
    pattern: Pattern = getattr(module, PATTERN)
    scale, softcap, sinks = _options(module, kwargs)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if pattern.causal:  # one sequence: no batch dimension reaches the op
        q, k, v = q[0], k[0], v[0]
    out: Tensor = attention(
        q, k, v, attention_mask, sinks,
        scale=scale, causal=pattern.causal, window=pattern.window, chunk=pattern.chunk, softcap=softcap,
    )  # fmt: skip
    return out[None] if pattern.causal else out, None


def _attend_paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The same over paged caches: new keys and values are written first, then all are read through the block table."""
    pattern: Pattern = getattr(module, PATTERN)
    index: int = getattr(module, INDEX)
    scale, softcap, sinks = _options(module, kwargs)
    q, k, v = (tensor.transpose(1, 2)[0] for tensor in (query, key, value))
    inputs = _paged.get()
    k_cache, v_cache = inputs.k_caches[index], inputs.v_caches[index]
    kv_write(k, v, k_cache, v_cache, inputs.slot_mapping)
    out: Tensor = paged_attention(
        q, k_cache, v_cache, inputs.block_table, inputs.seq_lens, inputs.query_starts, sinks,
        scale=scale, window=pattern.window, chunk=pattern.chunk, softcap=softcap,
    )  # fmt: skip
    return out[None], None


def _options(module: nn.Module, kwargs: dict[str, Any]) -> tuple[float | None, float | None, Tensor | None]:
    """Scale, soft cap and sinks among what a layer passes; refuses what would be lost."""
    name = type(module).__name__
    if kwargs.get("dropout"):
        raise TraceError(f"{name} attends with dropout={kwargs['dropout']}: the model is not in eval mode")
    for key, value in kwargs.items():
        if key not in TAKEN | IGNORED and (isinstance(value, Tensor) or (isinstance(value, float) and value)):
            raise TraceError(f"{name} attends with {key}, which fxc::attention does not take")
    return kwargs.get("scaling"), kwargs.get("softcap"), kwargs.get("s_aux")


def _key_mask(*, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """The mask function of a padded batch: the key mask as it came, [batch, seq]."""
    return attention_mask


def _read_mask(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, config: Any = None, **_: Any
) -> Pattern:
    """The mask function of the run on the meta device: which pattern is it?"""
    wide = local_size or 1
    points = sorted({p for k in range(4) for p in range(k * wide - 2, k * wide + 3) if p >= 0} | {1000, 1001, 100_003})
    index = torch.tensor(points)
    i, j = index[:, None], index[None, :]
    zero = torch.zeros_like(i[:1])
    try:
        seen = mask_function(zero, zero, i, j)
    except RuntimeError:  # reads a tensor that has no values here: chunks are counted from the first unpadded token
        if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
            return Pattern(causal=True, chunk=local_size)
        raise TraceError("a layer attends under a mask that depends on values of tensors") from None
    for pattern in (Pattern(causal, *local) for causal in (True, False) for local in _locals(local_size)):
        expected = visible(i, j, pattern.causal, pattern.window, pattern.chunk)
        if torch.equal(seen.expand_as(expected), expected):
            return pattern
    raise TraceError("a layer attends under a mask that is neither causal, nor full, nor a window, nor a chunk")


def _locals(size: int | None) -> list[tuple[int | None, int | None]]:
    """(window, chunk) that a local size may mean."""
    if size is None:
        return [(None, None)]
    return [(None, None), (size, None), (size + 1, None), (None, size)]
