"""Per-token quantization alone, after RMSNorm and after SiLU times up, against qarl.kernels.activations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from triton_rig import DEVICE, INTERPRETED

from qarl.kernels.activations import (
    CUDA_OPERATOR,
    CUDA_OPERATOR_BEFORE_STABLE,
    FP8,
    NATIVE,
    NormRounding,
    quantize_fp8_cuda,
    quantize_int8_cuda,
    rms_norm,
    silu_mul,
)
from qarl.kernels.triton.activations import norm_quantize, quantize_tokens, silu_mul_quantize

BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=["int8", "e4m3"])
EPS = 1e-6


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
    weight = torch.ones(96, dtype=BF16, device=DEVICE)
    for view in (wide[:, 64:], wide[::2, :96], wide[:, :96]):
        check(quantize_tokens(view, dtype), view, dtype)
        expected = norm_quantize(view.clone(), weight, EPS, dtype, residual=view.clone())
        found = norm_quantize(view, weight, EPS, dtype, residual=view)
        assert all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(found, expected, strict=True))
    check(quantize_tokens(wide[:, :3].t(), dtype), wide[:, :3].t(), dtype)
    check(silu_mul_quantize(wide[:, :80], wide[:, 80:], dtype), silu_mul(wide[:, :80], wide[:, 80:]), dtype)


@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_bad_row_shows_in_its_scale(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 70, dtype=BF16, device=DEVICE)
    x[1, 69] = bad
    one = torch.ones(70, dtype=BF16, device=DEVICE)
    for found in (quantize_tokens(x, dtype), norm_quantize(x, one, EPS, dtype), silu_mul_quantize(x, x, dtype)):
        scale = found[1]
        assert scale.isfinite().flatten().tolist() == [True, False, True]


@DTYPES
@pytest.mark.parametrize("rounding", [NATIVE, CUDA_OPERATOR, CUDA_OPERATOR_BEFORE_STABLE], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("cols", [64, 100, 1536], ids=str)
def test_norm_of_exact_sums(dtype: torch.dtype, rounding: NormRounding, residual: bool, cols: int) -> None:
    """Small whole numbers, whose squares add up exactly in any order: every bit must agree."""
    torch.manual_seed(3)
    x, other = (torch.randint(-9, 10, (5, cols), device=DEVICE).to(BF16) for _ in range(2))
    x[3] = 0
    weight = torch.randn(cols, device=DEVICE).to(BF16)
    added = other if residual else None
    found = norm_quantize(x, weight, EPS, dtype, residual=added, rounding=rounding)
    normed, total, rstd = rms_norm(x, weight, EPS, added, rounding)
    assert torch.equal(found.rstd, rstd)
    assert (found.residual is None) if added is None else torch.equal(found.residual, total)
    check(found[:2], normed, dtype)


@DTYPES
@pytest.mark.parametrize("rounding", [NATIVE, CUDA_OPERATOR, CUDA_OPERATOR_BEFORE_STABLE], ids=str)
@pytest.mark.parametrize("x_dtype", [BF16, torch.float32], ids=str)
def test_norm_against_float64(dtype: torch.dtype, rounding: NormRounding, x_dtype: torch.dtype) -> None:
    """Within what the roundings on the way allow: the sum with the residual, the normalised value, the product, the
    code, each half a unit of its format, and 1e-6 for the order of the sum."""
    torch.manual_seed(4)
    x = torch.randn(8, 1000, device=DEVICE).to(x_dtype)
    added = torch.randn(8, 1000, device=DEVICE).to(BF16) * 3 if x_dtype == BF16 else None
    weight = torch.randn(1000, device=DEVICE).to(BF16)
    found = norm_quantize(x, weight, EPS, dtype, residual=added, rounding=rounding)
    total = x.double() if added is None else x.double() + added.double()
    if rounding.sum:
        total = total.bfloat16().double()
    exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
    code_error = exact.abs() * 2.0**-4 + found.scale * 2.0**-10 if dtype == FP8 else found.scale.double() / 2
    bound = exact.abs() * (2.0**-8 * (1 + rounding.normalised) + 1e-6) + code_error * 1.01
    error = (found.values.double() * found.scale.double() - exact).abs()
    assert (error <= bound).all()


@DTYPES
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (4, 768), (3, 1000), (1, 16390), (0, 32)], ids=str)
def test_silu_mul(dtype: torch.dtype, rows: int, cols: int) -> None:
    """Bit for bit where the exponential is PyTorch's. NumPy's may differ by one FP32 unit, which a rounding to BF16
    shows in one product of some thousands, and so in its code: at most one code apart, in one of a hundred."""
    torch.manual_seed(5)
    gate, up = (torch.randn(rows, cols, device=DEVICE).to(BF16) * 3 for _ in range(2))
    values, scale = silu_mul_quantize(gate, up, dtype)
    expected_values, expected_scale = reference(silu_mul(gate, up), dtype)
    if not INTERPRETED:
        assert torch.equal(scale, expected_scale)
        assert torch.equal(values.view(torch.int8), expected_values.view(torch.int8))
    if rows:
        torch.testing.assert_close(scale, expected_scale, rtol=2.0**-7, atol=0)
        apart = (values.view(torch.int8).int() - expected_values.view(torch.int8).int()).abs()
        assert apart.max() <= 1 and (apart != 0).float().mean() <= 0.01
    exact = F.silu(gate.double()) * up.double()
    code_error = exact.abs() * 2.0**-4 + scale * 2.0**-10 if dtype == FP8 else scale.double() / 2
    error = (values.double() * scale.double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-7 + code_error * 1.01).all()


@DTYPES
def test_silu_at_the_ends(dtype: torch.dtype) -> None:
    """exp overflows at -89 and underflows at 104: silu is then -0 and the gate itself."""
    gate = torch.tensor([[-300.0, -100.0, -88.5, 0.0, 88.5, 200.0, 1e4, -1e30]], device=DEVICE).to(BF16)
    up = torch.full_like(gate, 2.0)
    check(silu_mul_quantize(gate, up, dtype), silu_mul(gate, up), dtype)


def test_refuses_what_it_cannot_read() -> None:
    x = torch.ones(4, 64, dtype=BF16, device=DEVICE)
    weight = torch.ones(64, dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="float8"):
        quantize_tokens(x, torch.uint8)
    with pytest.raises(ValueError, match="bfloat16"):
        quantize_tokens(x.half(), torch.int8)
    with pytest.raises(ValueError, match="M, K"):
        quantize_tokens(x[None], torch.int8)
    with pytest.raises(ValueError, match=r"BF16 \[64\]"):
        norm_quantize(x, weight.float(), EPS, torch.int8)
    with pytest.raises(ValueError, match="residual"):
        norm_quantize(x, weight, EPS, torch.int8, residual=x[:2])
    with pytest.raises(ValueError, match="fit one program"):
        wide = torch.ones(1, 16392, dtype=BF16, device=DEVICE)
        norm_quantize(wide, wide[0], EPS, torch.int8)
    with pytest.raises(ValueError, match="multiplied"):
        silu_mul_quantize(x, x[:, :32], FP8)
