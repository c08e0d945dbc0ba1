"""Per-token quantization against qarl.kernels.activations."""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels.activations import FP8, quantize_fp8_cuda, quantize_int8_cuda
from qarl.kernels.triton.activations import quantize_tokens

BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=["int8", "e4m3"])


def reference(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (quantize_fp8_cuda if dtype == FP8 else quantize_int8_cuda)(x)


def check(found: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal in every bit to the reference's quantization of x."""
    values, scale = reference(x, dtype)
    assert found[0].dtype == dtype and found[0].shape == x.shape
    assert torch.equal(found[1], scale)
    assert torch.equal(found[0].view(torch.int8), values.view(torch.int8))


@DTYPES
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 100), (6, 1536), (2, 8192), (2, 8200), (0, 64)], ids=str)
def test_tokens(dtype: torch.dtype, rows: int, cols: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, cols, device=DEVICE).to(BF16)
    check(quantize_tokens(x, dtype), x, dtype)


@DTYPES
def test_rows_of_all_magnitudes(dtype: torch.dtype) -> None:
    """Zeros, the e4m3 floor, subnormal numbers and the largest, and products that lie halfway between codes."""
    torch.manual_seed(1)
    rows = [torch.randn(254) * 10.0**exponent for exponent in range(-40, 38, 3)]
    halves = torch.arange(-127, 127) + 0.5
    rows += [torch.zeros(254), torch.full((254,), 3e38), torch.full((254,), -1e-40), halves.clamp(-127, 127)]
    x = torch.stack(rows).to(BF16).to(DEVICE)
    check(quantize_tokens(x, dtype), x, dtype)


@DTYPES
def test_rows_may_be_strided(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    wide = torch.randn(5, 160, device=DEVICE).to(BF16)
    for view in (wide[:, 64:], wide[::2, :96], wide[:, :96]):
        check(quantize_tokens(view, dtype), view, dtype)
    check(quantize_tokens(wide[:, :3].t(), dtype), wide[:, :3].t(), dtype)


@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_bad_row_shows_in_its_scale(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 70, dtype=BF16, device=DEVICE)
    x[1, 69] = bad
    _, scale = quantize_tokens(x, dtype)
    assert scale.isfinite().flatten().tolist() == [True, False, True]


def test_refuses_what_it_cannot_read() -> None:
    x = torch.ones(4, 64, dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="float8"):
        quantize_tokens(x, torch.uint8)
    with pytest.raises(ValueError, match="bfloat16"):
        quantize_tokens(x.half(), torch.int8)
    with pytest.raises(ValueError, match="M, K"):
        quantize_tokens(x[None], torch.int8)
