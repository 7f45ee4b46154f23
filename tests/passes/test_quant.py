"""Norms and gated activations that end in FP8: every form that is fused, its numbers, and look-alikes that are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fxc.prove import row_errors
from tests.passes.pieces import alone, every, execute, inputs, outcome, piece, reasons

FP8 = torch.float8_e4m3fn
Function = Callable[..., Any]


# --- the three ways to quantise, each with what the graphs of models differ in --------------------------------------


def static(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).clamp(-448, 448).to(FP8)


def static_narrow(y: Tensor, scale: Tensor) -> Tensor:
    return (y / scale).clamp(min=-448.0, max=448.0).to(FP8)


def static_inverse(y: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(scale * y.float(), -448.0, 448.0).to(FP8)


def per_token(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scales = (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    return (y.float() / scales).clamp(-448, 448).to(FP8), scales


def per_token_floored_before(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    wide = y.to(torch.float32)
    scales = wide.abs().amax(dim=wide.dim() - 1, keepdim=True).clamp_min(1e-3) * (1 / 448)
    return (wide * scales.reciprocal()).clamp(-448, 448).to(FP8), scales


def per_token_without_floor(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scales = y.abs().amax(-1, keepdim=True).float() / 240.0
    return (y / scales).clamp(-240, 240).to(FP8), scales


def per_block(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    blocks = y.unflatten(-1, (-1, 128)).float()
    scales = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    return (blocks / scales).clamp(-448, 448).to(FP8).flatten(-2), scales.squeeze(-1)


def per_block_viewed(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    blocks = y.view(*y.shape[:-1], y.shape[-1] // 128, 128)
    scales = (blocks.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    return (blocks.float() / scales).clamp(-448, 448).to(FP8).view(y.shape), scales[..., 0]


QUANTISATIONS: dict[str, Function] = {
    f.__name__: f
    for f in (
        static, static_narrow, static_inverse, per_token, per_token_floored_before, per_token_without_floor, per_block,
        per_block_viewed,
    )
}  # fmt: skip


# --- what comes before ----------------------------------------------------------------------------------------------


def unit(x: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * unit(x).to(x.dtype)


def norm_in_one_dtype(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    mean = (wide * wide).mean(dim=-1, keepdim=True)
    return (torch.rsqrt(1e-5 + mean) * wide * weight.float()).to(x.dtype)


def norm_one_more(x: Tensor, weight: Tensor) -> Tensor:
    return (unit(x) * (1.0 + weight.float())).type_as(x)


def norm_op(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def norm_plain(x: Tensor, weight: Tensor) -> Tensor:
    return unit(x).to(x.dtype)


NORMS: dict[str, Function] = {f.__name__: f for f in (norm, norm_in_one_dtype, norm_one_more, norm_op, norm_plain)}

ACTIVATIONS: dict[str, Function] = {
    "silu": lambda gate, up: silu(gate) * up,
    "silu behind": lambda gate, up: up * silu(gate),
    "silu by sigmoid": lambda gate, up: (gate * torch.sigmoid(gate)) * up,
    "silu in float32": lambda gate, up: (silu(gate.float()) * up.float()).to(gate.dtype),
    "gelu": lambda gate, up: gelu(gate) * up,
    "gelu by tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
}


def normed(norm: Function, quantise: Function, residual: bool = True) -> Function:
    if not residual:
        return lambda x, weight, scale: quantise(norm(x, weight), scale)

    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> tuple[Any, ...]:
        x = x + residual
        found = quantise(norm(x, weight), scale)
        return (*(found if isinstance(found, tuple) else (found,)), x)

    return function


def gated(activation: Function, quantise: Function) -> Function:
    def function(x: Tensor, scale: Tensor) -> Any:
        gate, up = x.chunk(2, -1)
        return quantise(activation(gate, up), scale)

    return function


def shapes(width: int, dtype: str = "bfloat16", residual: bool = True, batch: str = "") -> dict[str, str]:
    rows = {"x": f"{dtype}[{batch}n, {width}]"}
    more = {"residual": f"{dtype}[{batch}n, {width}]"} if residual else {}
    return {**rows, **more, "weight": f"{dtype}[{width}]", "scale": "float32[]"}


def gated_shapes(width: int, dtype: str = "bfloat16", batch: str = "") -> dict[str, str]:
    return {"x": f"{dtype}[{batch}n, {2 * width}]", "scale": "float32[]"}


def check_fused(text: str, name: str, op: str, values: Mapping[str, float] = {}) -> None:
    """One match, the rewritten piece has the op with these options, and it computes the same."""
    ran = alone(text, name)
    assert len(outcome(ran, name).matches) == 1, reasons(ran, name)
    assert ran.text.count(f"torch.ops.fxc.{op}.") == 1
    for key, value in values.items():
        assert f"{key}={value}" in ran.text
    for n in (1, 3):
        given = inputs(text, {"n": n})
        for have, want in zip(execute(ran.text, given), execute(text, given), strict=True):
            assert (have.dtype, have.shape, have.stride()) == (want.dtype, want.shape, want.stride())
            assert float(row_errors(have, want).max()) < (0.1 if want.dtype == FP8 else 0.01)


@pytest.mark.parametrize("residual", [True, False], ids=["sum", "one"])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("how", ["static", "per_token", "per_block"])
def test_every_norm(how: str, name: str, residual: bool) -> None:
    text = piece(normed(NORMS[name], QUANTISATIONS[how], residual), shapes(256, residual=residual))
    check_fused(text, "norm_quant", "norm_fp8", {"eps": 1e-05, "offset": 1.0 if name == "norm_one_more" else 0.0})


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("how", ["static", "per_token", "per_block"])
def test_every_activation(how: str, name: str) -> None:
    text = piece(gated(ACTIVATIONS[name], QUANTISATIONS[how]), gated_shapes(256))
    number = {"gelu": 1, "gelu by tanh": 2}.get(name, 0)
    check_fused(text, "gated_quant", "gated_fp8", {"activation": number})


CONSTANTS: dict[str, dict[str, Any]] = {
    "static": {"inverse": False, "limit": 448.0},
    "static_narrow": {"inverse": False},
    "static_inverse": {"inverse": True},
    "per_token": {"group": 0, "divisor": 448.0, "floor": 1e-06},
    "per_token_floored_before": {"group": 0, "divisor": 448.0, "floor": 0.001 / 448.0},
    "per_token_without_floor": {"limit": 240.0, "divisor": 240.0, "floor": 0.0},
    "per_block": {"group": 128, "floor": 1e-06},
    "per_block_viewed": {"group": 128},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", QUANTISATIONS)
def test_every_quantisation(name: str, dtype: str) -> None:
    """With the constants of the graph."""
    check_fused(piece(normed(norm, QUANTISATIONS[name]), shapes(256, dtype)), "norm_quant", "norm_fp8", CONSTANTS[name])
    text = piece(gated(ACTIVATIONS["silu"], QUANTISATIONS[name]), gated_shapes(256, dtype))
    check_fused(text, "gated_quant", "gated_fp8", CONSTANTS[name])


@pytest.mark.parametrize("name", ["static", "per_token", "per_block"])
def test_with_a_leading_batch_dimension(name: str) -> None:
    text = piece(normed(norm, QUANTISATIONS[name]), shapes(256, batch="2, "))
    check_fused(text, "norm_quant", "norm_fp8")
    text = piece(gated(ACTIVATIONS["silu"], QUANTISATIONS[name]), gated_shapes(256, batch="2, "))
    check_fused(text, "gated_quant", "gated_fp8")


@pytest.mark.parametrize("width", [1, 100, 1000])
def test_ragged_widths(width: int) -> None:
    check_fused(piece(normed(norm, static), shapes(width)), "norm_quant", "norm_fp8")
    check_fused(piece(gated(ACTIVATIONS["silu"], per_token), gated_shapes(width)), "gated_quant", "gated_fp8")


def test_golden(golden: Callable[[str, str], None]) -> None:
    for name, function, layouts in (
        ("norm_quant", normed(norm, per_token), shapes(256)),
        ("gated_quant", gated(ACTIVATIONS["silu"], per_block), gated_shapes(256)),
    ):
        text = piece(function, layouts)
        golden(f"pass_{name}.txt", f"{text}\n\n{alone(text, name).text}")


def test_both_stand_in_one_piece() -> None:
    """Each pass takes what is its own."""

    def function(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, -1)
        return static(norm(x, weight), scale), static(silu(gate) * up, scale)

    ran = every(piece(function, shapes(256, residual=False)))
    assert [len(found.matches) for _, found in ran.outcomes] == [1, 1]
    assert not [miss for _, found in ran.outcomes for miss in found.near_misses]


# --- look-alikes ----------------------------------------------------------------------------------------------------


def unclamped(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).to(FP8)


def clamped_wide(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).clamp(-500, 500).to(FP8)


def clamped_on_one_side(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).clamp(max=448).to(FP8)


def clamped_unevenly(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).clamp(0, 448).to(FP8)


def to_e5m2(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).clamp(-448, 448).to(torch.float8_e5m2)


def by_half(y: Tensor, scale: Tensor) -> Tensor:
    return (y.half() / scale).clamp(-448, 448).to(FP8)


def of_squares(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scales = (y.float().square().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    return (y.float() / scales).clamp(-448, 448).to(FP8), scales


def over_columns(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scales = (y.float().abs().amax(0, keepdim=True) / 448).clamp(min=1e-6)
    return (y.float() / scales).clamp(-448, 448).to(FP8), scales


def blocks_of_64(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    blocks = y.unflatten(-1, (-1, 64)).float()
    scales = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    return (blocks / scales).clamp(-448, 448).to(FP8).flatten(-2), scales


def also_unquantised(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return static(y, scale), y


def scale_capped(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scales = (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6, max=2.0)
    return (y.float() / scales).clamp(-448, 448).to(FP8), scales


QUANTISED_OTHERWISE: dict[str, tuple[Function, str]] = {
    "unclamped": (unclamped, "is aten::div, expected aten::clamp"),
    "clamped wider": (clamped_wide, "clamps to -500..500, expected -448..448 or less"),
    "clamped on one side": (clamped_on_one_side, "low is not a constant"),
    "clamped unevenly": (clamped_unevenly, "clamps to 0..448, expected -448..448 or less"),
    "to e5m2": (to_e5m2, "has torch.float8_e5m2 where torch.float8_e4m3fn is expected"),
    "by float16": (by_half, "is f16 on the way, expected f32 or bf16"),
    "scale of squares": (of_squares, "expected one f32 as scale"),
    "scale of columns": (over_columns, "expected one f32 as scale"),
    "scale with a maximum": (scale_capped, "expected one f32 as scale"),
    "blocks of 64": (blocks_of_64, "has a scale for each 64, the kernel for each 128 or each row"),
    "another user": (also_unquantised, "its value is used by output, too"),
}


@pytest.mark.parametrize("name", QUANTISED_OTHERWISE)
def test_quantisations_that_only_look_alike(name: str) -> None:
    quantise, reason = QUANTISED_OTHERWISE[name]
    for which, text in (
        ("norm_quant", piece(normed(norm, quantise), shapes(256))),
        ("gated_quant", piece(gated(ACTIVATIONS["silu"], quantise), gated_shapes(256))),
    ):
        ran = alone(text, which)
        assert ran.text == alone(text, "noop").text
        assert [reason in found for found in reasons(ran, which)] == [True], reasons(ran, which)


def over_rows(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-5)).to(x.dtype) * weight


def cubed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(3).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def summed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def centred(x: Tensor, weight: Tensor) -> Tensor:
    return norm(x - x.mean(-1, keepdim=True), weight) + weight


def of_another(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt((wide + 1).pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def narrow_mean(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def learned_epsilon(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + weight[0])).to(x.dtype)


def row_weights(x: Tensor, weight: Tensor) -> Tensor:
    return unit(x).to(x.dtype) * x


def op_without_epsilon(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight)


NORMED_OTHERWISE: dict[str, tuple[Function, str]] = {
    "over rows": (over_rows, "has [-2] where [-1] is expected"),
    "cubes": (cubed, "has 3 where 2 is expected"),
    "sum": (summed, "is aten::sum, expected aten::mean"),
    "a bias": (centred, "is aten::add, expected"),
    "mean of something else": (of_another, "as before"),
    "mean in bfloat16": (narrow_mean, "is not taken in f32"),
    "epsilon in a tensor": (learned_epsilon, "eps is not a constant"),
    "weights of its own for each row": (row_weights, "expected as many weights as"),
    "epsilon left to torch": (op_without_epsilon, "eps is not a constant"),
}


@pytest.mark.parametrize("name", NORMED_OTHERWISE)
def test_norms_that_only_look_alike(name: str) -> None:
    function, reason = NORMED_OTHERWISE[name]
    text = piece(normed(function, static, residual=False), shapes(256, residual=False))
    ran = alone(text, "norm_quant")
    assert ran.text == alone(text, "noop").text
    assert [reason in found for found in reasons(ran, "norm_quant")] == [True], reasons(ran, "norm_quant")


GATED_OTHERWISE: dict[str, tuple[Function, str]] = {
    "clamped gate": (lambda x: silu(x[:, :256]).clamp(max=2) * x[:, 256:], "is aten::clamp, expected"),
    "clamped value": (lambda x: (silu(x[:, :256]) * x[:, 256:]).clamp(max=2), "is aten::clamp, expected"),
    "interleaved": (lambda x: silu(x[:, ::2]) * x[:, 1::2], "has stride 2 in its last dimension, the kernel needs 1"),
    "a sum": (lambda x: silu(x[:, :256]) + x[:, 256:], "is aten::add, expected aten::mul"),
    "scaled before": (lambda x: (x[:, :256] * torch.sigmoid(1.702 * x[:, :256])) * x[:, 256:], ""),
    "another shape": (lambda x: silu(x[:, :256]) * x[:, 256:257], "is bf16[n, 1]"),
    "another dtype": (lambda x: silu(x[:, :256]) * (x[:, 256:].float() + 1), "one for all"),
}


@pytest.mark.parametrize("name", GATED_OTHERWISE)
def test_gates_that_only_look_alike(name: str) -> None:
    function, reason = GATED_OTHERWISE[name]
    text = piece(lambda x, scale: static(function(x), scale), gated_shapes(256))
    ran = alone(text, "gated_quant")
    assert ran.text == alone(text, "noop").text
    assert [reason in found for found in reasons(ran, "gated_quant")] == [True], reasons(ran, "gated_quant")


def test_scales_that_are_not_one_float32() -> None:
    for layout, fused in (
        ("float32[1]", True),
        ("float32[1, 1]", True),
        ("bfloat16[]", False),
        ("float32[256]", False),
    ):
        text = piece(gated(ACTIVATIONS["silu"], static), {**gated_shapes(256), "scale": layout})
        ran = alone(text, "gated_quant")
        assert (ran.text != text) == fused
        assert fused or "expected one f32 as scale" in reasons(ran, "gated_quant")[0]


def test_wider_than_the_kernel() -> None:
    text = piece(gated(ACTIVATIONS["silu"], static), gated_shapes(16385))
    assert "is 16385 wide, the kernel takes 16384" in reasons(alone(text, "gated_quant"), "gated_quant")[0]


@pytest.mark.parametrize("name", ["norm_quant", "gated_quant"])
def test_one_quantisation_of_what_several_layers_read(name: str) -> None:
    """Layers of queries, keys and values that quantise their input each, by a scale of its own, have the same."""

    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        y = norm(x + residual, weight) if name == "norm_quant" else torch.nn.functional.silu(x) * residual
        parts = [per_token(y, scale) for _ in range(3)]
        q, k, v = (part.float() * scales for part, scales in parts)
        return q + 2 * k + 3 * v

    text = piece(function, shapes(256))
    ran = alone(text, name)
    assert len(outcome(ran, name).matches) == 1
    assert ran.text.count("torch.ops.fxc.") == 1
    for n in (1, 5):
        given = inputs(text, {"n": n})
        for have, want in zip(execute(ran.text, given), execute(text, given), strict=True):
            assert float(row_errors(have, want).max()) < 0.05


def test_a_sum_that_is_needed_before_the_scale_is_there() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x = x + residual
        late = x.float().sum()
        return static(norm(x, weight), late), x

    text = piece(function, shapes(256))
    ran = alone(text, "norm_quant")
    assert len(outcome(ran, "norm_quant").matches) == 1
    assert "residual" not in ran.text
    assert "add = torch.ops.aten.add.Tensor(in_0, in_1)" in ran.text, "the sum is left where it was"
