"""`fxc::kv_write`: puts new keys and values into their slots of a paged cache.

k [tokens, kv_heads, d]   v [tokens, kv_heads, dv]   caches [blocks, block_size, kv_heads, d or dv]
slot_mapping int64 [tokens]: block * block_size + offset; -1 for a pad row, which is not written
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxc.errors import InputError

SCHEMA = "kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()"


def scatter(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """One scatter for each cache, in ATen ops that a compiler can trace: no size or branch depends on data.

    A scatter cannot leave rows out, and a pad row must not race with a real one. So a pad row writes what the first
    real row writes, to the same slot. If there are pad rows only, all of them write slot 0 as it is.
    """
    real = slot_mapping >= 0
    row = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    row = torch.where(real, row, real.to(torch.int32).argmax())
    slot = slot_mapping[row]
    some, slot = (slot >= 0)[:, None, None], slot.clamp(min=0)
    where = (slot // k_cache.shape[1], slot % k_cache.shape[1])
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.index_put_(where, torch.where(some, new[row], cache[where]))


def _cpu(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    check(k, v, k_cache, v_cache, slot_mapping)
    _check_sizes(k, v, slot_mapping)
    if slot_mapping.shape[0]:
        scatter(k, v, k_cache, v_cache, slot_mapping)


def _cuda(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    check(k, v, k_cache, v_cache, slot_mapping)
    _check_sizes(k, v, slot_mapping)
    from fxc.ops import paged_triton

    if slot_mapping.shape[0]:
        paged_triton.write(k, v, k_cache, v_cache, slot_mapping)


def check(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Refuse what the op does not take, by the argument's name. Static facts only."""
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dim() != 3:
            raise _refuse(name, f"has {new.dim()} dimensions", "[tokens, kv_heads, d]")
        if cache.dim() != 4:
            raise _refuse(f"{name}_cache", f"has {cache.dim()} dimensions", "[blocks, block_size, kv_heads, d]")
        if cache.dtype != new.dtype:
            raise _refuse(f"{name}_cache", f"is {cache.dtype}", f"{new.dtype}, as {name} is")
        if cache.shape[2:] != new.shape[1:]:
            raise _refuse(f"{name}_cache", f"holds {list(cache.shape[2:])}", f"{list(new.shape[1:])}, as {name} has")
        if cache.stride(-1) != 1:
            raise _refuse(f"{name}_cache", f"has stride {cache.stride(-1)} in its last dimension", "1")
    if v_cache.shape[1] != k_cache.shape[1]:
        raise _refuse("v_cache", f"has {v_cache.shape[1]} slots in a block", f"{k_cache.shape[1]}, as k_cache has")
    if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64:
        found = f"is {slot_mapping.dtype} with {slot_mapping.dim()} dimensions"
        raise _refuse("slot_mapping", found, "torch.int64 with 1: [tokens]")
    if slot_mapping.stride(0) != 1:
        raise _refuse("slot_mapping", f"has stride {slot_mapping.stride(0)}", "1")


def _check_sizes(k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    for name, tensor in (("v", v), ("slot_mapping", slot_mapping)):
        if tensor.shape[0] != k.shape[0]:
            raise _refuse(name, f"has {tensor.shape[0]} tokens", f"{k.shape[0]}, as k has")


def _refuse(argument: str, found: str, expected: str) -> InputError:
    return InputError(f"fxc::kv_write: {argument} {found}, expected {expected}")


_library = torch.library.Library("fxc", "FRAGMENT")
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("kv_write", _cpu, "CPU")
_library.impl("kv_write", _cuda, "CUDA")
_library.impl("kv_write", check, "Meta")

kv_write = torch.ops.fxc.kv_write.default
