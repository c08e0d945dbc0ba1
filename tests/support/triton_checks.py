"""What the tests of Triton kernels share: which GPUs have products of e4m3 numbers, and the bound of one rounding."""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels.triton.linears import unavailable
from qarl.schemes.base import FP8_FP8

NO_E4M3 = unavailable(FP8_FP8, torch.device(DEVICE))
needs_e4m3 = pytest.mark.skipif(NO_E4M3 is not None, reason=str(NO_E4M3))
SCHEMES = ["w4a16", "w8a8", pytest.param("fp8", marks=needs_e4m3)]


def assert_one_rounding(
    output: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, error: float = 1e-6
) -> None:
    """BF16 nearest to `exact`, up to FP32 sums whose error is relative to `size`, the terms' magnitudes."""
    output = output.detach().cpu()
    assert output.dtype == torch.bfloat16 and output.shape == exact.shape
    assert ((output.double() - exact).abs() <= exact.abs() * 2**-8 + size * error).all()
