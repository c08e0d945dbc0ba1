"""A scheme of a plugin with a rule of its own for scales: quantize.py asks it, for linears and for experts."""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.quant.experts import quantize_stack
from qarl.quant.quantize import quantize
from qarl.schemes.w4a16 import W4A16


class PowersOfTwo(W4A16):
    """Scales are the powers of two that are at least absmax / 7.5."""

    name = "w4a16_powers"

    def scales(self, groups: Tensor) -> Tensor:
        absmax = groups.abs().amax(-1).float()
        return torch.exp2(torch.log2(absmax / 7.5).ceil()).to(groups.dtype)


def test_scales_by_hand() -> None:
    """absmax 15 / 7.5 = 2 stays; 16 / 7.5 becomes 4. Codes are weight / scale, half to even. Zeros get eps."""
    rows = [
        [15.0, -15.0, 3.0, 5.0, 1.0, 0.0, 2.0, -2.0],
        [16.0, -16.0, 6.0, 10.0, 4.0, 0.0, 2.0, -4.0],
        [0.0] * 8,
    ]
    quantized = quantize(torch.tensor(rows).bfloat16(), PowersOfTwo(8))
    eps = torch.finfo(torch.bfloat16).eps
    assert quantized.tensors["weight_scale"].tolist() == [[2.0], [4.0], [eps]]
    assert quantized.dequantize().tolist() == [
        [14.0, -16.0, 4.0, 4.0, 0.0, 0.0, 2.0, -2.0],
        [16.0, -16.0, 8.0, 8.0, 4.0, 0.0, 0.0, -4.0],
        [0.0] * 8,
    ]


def test_experts_follow_the_same_rule() -> None:
    stack = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = quantize_stack(stack, PowersOfTwo(8), name="experts")
    for expert, weight in enumerate(stack):
        alone = quantize(weight, PowersOfTwo(8)).tensors
        for name in ("weight_packed", "weight_scale"):
            assert torch.equal(whole.tensors[name][expert], alone[name])


def test_a_scheme_without_a_rule_has_the_grids() -> None:
    assert W4A16(8).scales(torch.ones(1, 1, 8)) is None
