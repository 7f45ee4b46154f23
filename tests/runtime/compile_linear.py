"""Compile `x @ weight.t()` for n from 1 to 64 into a library. A process of its own: it imports Inductor."""

import sys

import torch
from torch._inductor import aot_compile


class Linear(torch.nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ weight.t() + 0.0,)


if __name__ == "__main__":
    args = (torch.randn(11, 4), torch.randn(4, 4))
    dims = {"x": {0: torch.export.Dim("n", min=1, max=64)}, "weight": None}
    graph = torch.export.export(Linear(), args, dynamic_shapes=dims).module(check_guards=False)
    aot_compile(graph, args, options={"aot_inductor.output_path": sys.argv[1]})
