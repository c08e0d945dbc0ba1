"""Weights and activations to low bits and back: equal in every byte to qarl.quant.quantize (itself equal to
compressed-tensors) and to qarl.kernels.reference; and the way back from Marlin's layout."""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels import int4
from qarl.kernels.base import dequantize as dequantize_tokens
from qarl.kernels.reference import quantize_fp8_cuda, quantize_int8_cuda
from qarl.kernels.triton.quantize import (
    codes_from_marlin,
    dequantize_int4,
    dequantize_rows,
    quantize_int4,
    quantize_rows,
    quantize_tokens,
)
from qarl.quant.quantize import quantize
from qarl.schemes import get_scheme

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
SCHEMES = ("w4a16", "w8a8", "fp8")
CODES = {"w8a8": torch.int8, "fp8": FP8}
DTYPES = pytest.mark.parametrize("dtype", CODES.values(), ids=["int8", "e4m3"])
Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(weight: torch.Tensor, scheme: str, group_size: int = 32) -> Made:
    """Values, scales and the flag."""
    if scheme == "w4a16":
        return quantize_int4(weight, group_size)
    return quantize_rows(weight, CODES[scheme])


def check(weight: torch.Tensor, scheme: str, group_size: int = 32) -> None:
    wanted = quantize(weight.cpu(), get_scheme(scheme, group_size=group_size)).tensors
    values, scale, flag = (tensor.cpu() for tensor in run(weight, scheme, group_size))
    expected = wanted["weight_packed" if scheme == "w4a16" else "weight"]
    assert (
        flag.tolist() == [0]
        and values.dtype == expected.dtype
        and scale.dtype == wanted["weight_scale"].dtype
    )
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8), wanted["weight_scale"].view(torch.uint8))


@pytest.mark.parametrize("group_size", [8, 24, 32, 64, 96, 128, 288])
def test_group_sizes(group_size: int) -> None:
    """Also those that are not powers of two, for which part of a tile is empty."""
    torch.manual_seed(1)
    check(
        torch.randn(11, 288 if 288 % group_size == 0 else 384, device=DEVICE).to(BF16),
        "w4a16",
        group_size,
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_ties_and_extremes(scheme: str, dtype: torch.dtype) -> None:
    """Codes halfway between two, and groups at both ends of the range: scales from eps and subnormal to 1e37."""
    torch.manual_seed(3)
    halves = torch.arange(-15, 16, dtype=FP32) / 2
    rows = [
        torch.cat([halves, halves.new_tensor([7.5])]) * scale
        for scale in (1.0, 0.25, 3.0, 1e-30, 1e30)
    ]
    rows += [torch.randn(32) * scale for scale in (1e-40, 3e-39, 2e-38, 1e-36, 5e-2, 1e36, 8e37)]
    rows += [torch.full((32,), value) for value in (0.0, 1e-45, 9.2e-41, 1.2e-38, -3e38, 2e-2)]
    weight = torch.stack(rows).to(dtype).to(DEVICE)
    check(weight, scheme)


@pytest.mark.parametrize("off", [-1.0, 0.0, 1.0], ids=str)
def test_reciprocal_equals_division_on_the_bf16_grid(off: float) -> None:
    """The argument in the module's docstring, for every pair of significands, and for every number and half range.

    Subnormal scales can be ties; there FP32 is too coarse for an error to show.
    """
    significands = torch.arange(128, 256, dtype=FP32, device=DEVICE)
    w, s = significands[:, None] / 16, significands[None, :]
    assert torch.equal((w * (1.0 / s * (1 + off * 2.0**-21))).to(BF16), (w / s).to(BF16))
    absmax = (
        torch.arange(0x7F80, dtype=torch.int32, device=DEVICE).to(torch.int16).view(BF16).float()
    )
    for half_range in (7.5, 127.5, 448.0):
        divisor = torch.full_like(absmax, half_range)
        assert torch.equal(
            (absmax * (1.0 / divisor * (1 + off * 2.0**-23))).to(BF16), (absmax / divisor).to(BF16)
        )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_bf16_number(scheme: str) -> None:
    """All 65280 finite ones, in groups of mixed magnitude."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    numbers = numbers[numbers.isfinite()]
    shuffled = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))]
    for order in (numbers, shuffled):
        check(order.view(-1, 4080).to(DEVICE), scheme, 48)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "value", [float("nan"), float("-nan"), float("inf"), float("-inf")], ids=str
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_nonfinite_is_flagged(scheme: str, value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(5, 1056, dtype=dtype, device=DEVICE)
    assert run(weight, scheme)[2].item() == 0
    weight[4, 1055] = value
    assert run(weight, scheme)[2].item() == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_strided_weights_and_tokens(scheme: str) -> None:
    torch.manual_seed(4)
    wide = torch.randn(32, 128, device=DEVICE).to(BF16)
    for view in (wide[:5, 32:], wide[::8], wide[:, :5].t(), wide[5:6]):
        check(view, scheme)
        if scheme != "w4a16":
            check_tokens(view, CODES[scheme])


@pytest.mark.parametrize(("group_size", "cols"), [(32, 96), (8, 8), (24, 72), (128, 1408)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_dequantize_int4(group_size: int, cols: int, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    packed = torch.randint(-(2**31), 2**31 - 1, (7, cols // 8), dtype=torch.int32, device=DEVICE)
    scale = torch.randn(7, cols // group_size, device=DEVICE).to(dtype)
    weight = dequantize_int4(packed, scale)
    assert torch.equal(weight, int4.dequantize_int4(packed, scale))
    strided = torch.stack((packed, packed), dim=2)[:, :, 0]
    assert torch.equal(dequantize_int4(strided, scale), weight)


@DTYPES
@pytest.mark.parametrize("cols", [1, 100, 2050], ids=str)
def test_dequantize_rows(dtype: torch.dtype, cols: int) -> None:
    torch.manual_seed(6)
    codes = torch.randint(0, 256, (5, cols), dtype=torch.uint8, device=DEVICE)
    codes[(codes & 0x7F) == 0x7F] = 0  # the NaN of e4m3
    values, scale = codes.view(dtype), torch.rand(5, 1, device=DEVICE)
    assert torch.equal(dequantize_rows(values, scale), dequantize_tokens(values, scale))
    wide = torch.cat((codes, codes), dim=1).view(dtype)[:, :cols]
    assert torch.equal(dequantize_rows(wide, scale), dequantize_tokens(values, scale))


def check_tokens(x: torch.Tensor, dtype: torch.dtype) -> None:
    values, scale = (quantize_fp8_cuda if dtype == FP8 else quantize_int8_cuda)(x)
    quantized = quantize_tokens(x, dtype)
    assert quantized[0].dtype == dtype and quantized[0].shape == x.shape
    assert torch.equal(quantized[1], scale)
    assert torch.equal(quantized[0].view(torch.int8), values.view(torch.int8))


@pytest.mark.parametrize("scheme", CODES)
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (3, 100), (6, 1536), (2, 8192), (2, 8200)], ids=str
)
def test_rows_as_weights_and_as_tokens(scheme: str, rows: int, cols: int) -> None:
    """8200 columns are read twice, in blocks of which the last is almost empty."""
    torch.manual_seed(2)
    x = torch.randn(rows, cols, device=DEVICE).to(BF16)
    check(x, scheme)
    check_tokens(x, CODES[scheme])


@DTYPES
def test_rows_of_all_magnitudes(dtype: torch.dtype) -> None:
    """Zeros, the e4m3 floor, subnormal numbers and the largest, and products that lie halfway between codes."""
    torch.manual_seed(1)
    rows = [torch.randn(254) * 10.0**exponent for exponent in range(-40, 38, 3)]
    halves = torch.arange(-127, 127) + 0.5
    rows += [
        torch.zeros(254),
        torch.full((254,), 3e38),
        torch.full((254,), -1e-40),
        halves.clamp(-127, 127),
    ]
    x = torch.stack(rows).to(BF16).to(DEVICE)
    check_tokens(x, dtype)


@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_bad_row_shows_in_its_scale(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 70, dtype=BF16, device=DEVICE)
    x[1, 69] = bad
    _, scale = quantize_tokens(x, dtype)
    assert scale.isfinite().flatten().tolist() == [True, False, True]


@pytest.mark.parametrize("sizes", [(1, 64, 16), (3, 192, 48), (2, 128, 272)], ids=str)
def test_the_codes_come_back_from_marlins_layout(sizes: tuple[int, int, int]) -> None:
    experts, rows, columns = sizes
    packed = torch.randint(-(2**31), 2**31, (experts, rows, columns // 8)).to(torch.int32)
    assert torch.equal(codes_from_marlin(int4._codes_to_marlin(packed).to(DEVICE)).cpu(), packed)
