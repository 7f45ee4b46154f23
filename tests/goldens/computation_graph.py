"""BatchSeq, traced by fxc 0.1.0.

The graph that was traced, before it was cut."""

import torch


def step_0(p_lin_weight: "f32[8, 8]", p_lin_bias: "f32[8]", x: "f32[batch, seq, 8]"):
    sym_size_int_2 = torch.ops.aten.sym_size.int(x, 0)
    sym_size_int_3 = torch.ops.aten.sym_size.int(x, 1)
    # sizes.py:27 in forward: flat = self.lin(x).view(batch * seq, 8)
    linear = torch.ops.aten.linear.default(x, p_lin_weight, p_lin_bias)  # f32[batch, seq, 8]
    mul = sym_size_int_2 * sym_size_int_3
    view = torch.ops.aten.view.default(linear, [mul, 8])  # f32[batch*seq, 8] strides [min(8, 8*seq), 1]
    # sizes.py:28 in forward: y = torch.ops.zoo.mix(flat)
    mix = torch.ops.zoo.mix.default(view)  # f32[batch*seq, 8]
    # sizes.py:29 in forward: z = torch.ops.zoo.mix(torch.relu(y))
    relu = torch.ops.aten.relu.default(mix)  # f32[batch*seq, 8]
    mix_1 = torch.ops.zoo.mix.default(relu)  # f32[batch*seq, 8]
    # sizes.py:30 in forward: out: Tensor = z.view(batch, seq, 8) + x.mean(1, keepdim=True)
    view_1 = torch.ops.aten.view.default(mix_1, [sym_size_int_2, sym_size_int_3, 8])  # f32[batch, seq, 8]
    mean = torch.ops.aten.mean.dim(x, [1], True)  # f32[batch, 1, 8]
    add = torch.ops.aten.add.Tensor(view_1, mean)  # f32[batch, seq, 8]
    return (add,)
