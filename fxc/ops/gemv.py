"""`fxc::gemv`: a linear layer of a single row, which takes as long as reading its weights.

    x [..., k], all sizes but the last 1   weight [n, k]   bias [n]   -> [..., n]

The sums are float32, rounded once. A pass puts the op into graphs, and a build makes a kernel of it: no program calls
it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library = torch.library.Library("fxc", "FRAGMENT")
_library.define("gemv(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("gemv", linear, "CPU")
_library.impl("gemv", linear, "CUDA")
_library.impl("gemv", _fake, "Meta")

gemv = torch.ops.fxc.gemv.default
