"""`fxc::norm_rope_write`: what `fxc::norm_rope` does to queries and keys, and `fxc::kv_write` of these keys.

    x [..., tokens, heads, d]: queries, if any, and last keys   v [tokens, kv_heads, dv]
    k_cache, v_cache, slot_mapping as in `fxc::kv_write`        the rest as in `fxc::norm_rope`
    -> turned queries [..., tokens, heads, d]; keys are in the cache only

A pass puts the op into graphs, and a build makes a kernel of it: no program calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxc.ops.kv_write import scatter
from fxc.ops.rope import reference as turn

SCHEMA = (
    "norm_rope_write(Tensor[] x, Tensor v, Tensor[] weights, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slot_mapping, *, int rotary, bool interleaved=False, bool norm=False, "
    "float eps=0.0, float offset=0.0) -> Tensor[]"
)


def reference(
    x: Sequence[Tensor], v: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """The op in ATen ops that a compiler can trace."""
    *turned, k = turn(x, weights, cos, sin, **options)
    scatter(k.flatten(0, -3), v, k_cache, v_cache, slot_mapping)
    return turned


def _fake(x: Sequence[Tensor], *_: object, **__: object) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in x[:-1]]


_library = torch.library.Library("fxc", "FRAGMENT")
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _library.impl("norm_rope_write", reference, _key)
_library.impl("norm_rope_write", _fake, "Meta")  # not register_fake: see attention.py

norm_rope_write = torch.ops.fxc.norm_rope_write.default
