"""Ops whose results show the memory of an argument, or that write into one, where schemas do not tell."""

from __future__ import annotations

from typing import Any

from fxc._torch_build import schema


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


VIEWS_OF_SEVERAL = _aten("broadcast_tensors cartesian_prod chain_matmul linalg_multi_dot meshgrid")
"""Each result shows another argument."""
UNDECLARED_VIEWS = VIEWS_OF_SEVERAL | _aten(
    "_cast_Double _cast_Float _cast_Half _cast_Int _cast_Long alpha_dropout atleast_1d atleast_2d atleast_3d "
    "combinations conj_physical dropout einsum feature_alpha_dropout feature_dropout sum_to_size type_as _unsafe_view "
    "unsafe_chunk unsafe_split unsafe_split_with_sizes"
)
"""Composites of views, or of ops that may give an argument back."""
TRAINS = _aten("_batch_norm_impl_index batch_norm cudnn_batch_norm instance_norm native_batch_norm")
"""Write running statistics in training."""


def may_view(op: Any) -> bool:
    """Whether a result may show the memory of an argument; reshape, to and contiguous may have to copy."""
    declared = schema(op)
    return str(declared.name) in UNDECLARED_VIEWS or any(result.alias_info for result in declared.returns)
