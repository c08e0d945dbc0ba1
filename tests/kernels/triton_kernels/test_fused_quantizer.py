"""The comparison that decides whether the fused quantizer may take the place of the eager one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_rig import DEVICE

from qarl.quant.quantize import _eager, _run_fused, find_difference
from qarl.quant.scheme import QuantArgs, get_scheme

Made = tuple[Tensor, Tensor, Tensor]


def arguments(scheme: str) -> QuantArgs:
    args = get_scheme(scheme, group_size=32).weights
    assert args is not None
    return args


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_quantizers_are_found_equal(scheme: str, dtype: torch.dtype) -> None:
    device = torch.device(DEVICE)
    assert find_difference(_run_fused, _eager, dtype, device, arguments(scheme)) is None


@pytest.mark.parametrize("output", [0, 1, 2], ids=["values", "scale", "flag"])
def test_one_different_byte_is_found(output: int) -> None:
    def off_by_one_byte(weight: Tensor, args: QuantArgs) -> Made:
        made = _eager(weight, args)
        if weight.shape[0] == 67:
            made[output].view(-1).view(torch.uint8)[-1] ^= 1
        return made

    device = torch.device(DEVICE)
    found = find_difference(off_by_one_byte, _eager, torch.bfloat16, device, arguments("w4a16"))
    assert found is not None and "normal numbers" in found


def test_dividing_by_the_unrounded_scale_is_found() -> None:
    """An error of the kind a compiler makes that keeps BF16 intermediates in FP32."""

    def fp32_intermediates(weight: Tensor, args: QuantArgs) -> Made:
        return _eager(weight.float(), args)

    def to_bf16_scale(weight: Tensor, args: QuantArgs) -> Made:
        values, scale, flag = fp32_intermediates(weight, args)
        return values, scale.to(weight.dtype), flag

    device = torch.device(DEVICE)
    assert find_difference(to_bf16_scale, _eager, torch.bfloat16, device, arguments("w4a16")) is not None
