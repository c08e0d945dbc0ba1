"""Weights to low bits and back, equal in every byte to qarl.quant.quantize, itself equal to compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels.activations import dequantize as dequantize_tokens
from qarl.kernels.int4 import dequantize_int4 as int4_reference
from qarl.kernels.triton.quantize import Quantized, dequantize_int4, dequantize_rows, quantize_int4, quantize_rows
from qarl.quant.quantize import QuantizedTensor, quantize
from qarl.quant.scheme import get_scheme

BF16, FP32 = torch.bfloat16, torch.float32
SCHEMES = ("w4a16", "w8a8", "fp8")


def run(weight: torch.Tensor, scheme: str, group_size: int = 32, **options: Any) -> Quantized:
    if scheme == "w4a16":
        return quantize_int4(weight, group_size, **options)
    return quantize_rows(weight, {"w8a8": torch.int8, "fp8": torch.float8_e4m3fn}[scheme], **options)


def check(weight: torch.Tensor, scheme: str, group_size: int = 32, grid: torch.dtype = BF16) -> None:
    """Kernel and reference on the same numbers: low-bit tensors, and the dequantized copy of the same pass."""
    reference = quantize(weight.to(grid), get_scheme(scheme, group_size=group_size))
    for copy in (False, True):
        found = run(weight, scheme, group_size, grid=grid, dequantize=copy)
        assert found.nonfinite.tolist() == [0]
        names = ("weight_packed" if scheme == "w4a16" else "weight", "weight_scale")
        tensors = dict(zip(names, found[:2], strict=True))
        shape = {k: v for k, v in reference.tensors.items() if k == "weight_shape"}
        assert QuantizedTensor(reference.scheme, reference.shape, tensors | shape).equals(reference)
        assert (found.dequantized is not None) == copy
        if found.dequantized is not None:
            assert torch.equal(found.dequantized.view(torch.int16), reference.dequantize().view(torch.int16))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("dtype", "grid"), [(BF16, BF16), (FP32, BF16), (FP32, FP32)])
@pytest.mark.parametrize("shape", [(1, 96), (5, 192), (37, 288)], ids=str)
def test_equals_the_quantizer(scheme: str, dtype: torch.dtype, grid: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape, device=DEVICE) * 0.05).to(dtype)
    weight[0, :32] = 0  # a group whose scale becomes eps
    weight[-1, 32:64] *= 1e-3
    check(weight, scheme, grid=grid)


@pytest.mark.parametrize("group_size", [8, 24, 32, 64, 96, 128, 288])
def test_group_sizes(group_size: int) -> None:
    """Also those that are not powers of two, for which part of a tile is empty."""
    torch.manual_seed(1)
    check(torch.randn(11, 288 if 288 % group_size == 0 else 384, device=DEVICE).to(BF16), "w4a16", group_size)


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
@pytest.mark.parametrize("cols", [1, 100, 8192, 8200], ids=str)
def test_long_rows(scheme: str, cols: int) -> None:
    """8200 columns are read twice, in blocks of which the last is almost empty."""
    torch.manual_seed(2)
    check(torch.randn(2, cols, device=DEVICE).to(BF16), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("grid", [BF16, FP32], ids=str)
def test_ties_and_extremes(scheme: str, grid: torch.dtype) -> None:
    """Codes halfway between two, and groups at both ends of the range: scales from subnormal to 1e37."""
    torch.manual_seed(3)
    halves = torch.arange(-15, 16, dtype=FP32) / 2
    rows = [torch.cat([halves, halves.new_tensor([7.5])]) * scale for scale in (1.0, 0.25, 3.0, 1e-30, 1e30)]
    rows += [torch.randn(32) * scale for scale in (1e-40, 3e-39, 2e-38, 1e-36, 1e36, 8e37)]
    rows += [torch.full((32,), value) for value in (1e-45, 9.2e-41, 1.2e-38, -3e38, 2e-2)]
    weight = torch.stack(rows).to(grid).to(DEVICE)
    check(weight, scheme, grid=grid)


@pytest.mark.parametrize("off", [-1.0, 0.0, 1.0], ids=str)
def test_reciprocal_equals_division_on_the_bf16_grid(off: float) -> None:
    """The argument in the module's docstring, for every pair of significands, and for every number and half range.

    Subnormal scales can be ties; there FP32 is too coarse for an error to show.
    """
    significands = torch.arange(128, 256, dtype=FP32, device=DEVICE)
    w, s = significands[:, None] / 16, significands[None, :]
    assert torch.equal((w * (1.0 / s * (1 + off * 2.0**-21))).to(BF16), (w / s).to(BF16))
    absmax = torch.arange(0x7F80, dtype=torch.int32, device=DEVICE).to(torch.int16).view(BF16).float()
    for half_range in (7.5, 127.5, 448.0):
        divisor = torch.full_like(absmax, half_range)
        assert torch.equal((absmax * (1.0 / divisor * (1 + off * 2.0**-23))).to(BF16), (absmax / divisor).to(BF16))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_bf16_number(scheme: str) -> None:
    """All 65280 finite ones, in groups of mixed magnitude."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    numbers = numbers[numbers.isfinite()]
    shuffled = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))]
    for order in (numbers, shuffled):
        check(order.view(-1, 4080).to(DEVICE), scheme, 48)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("-nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_nonfinite_is_flagged(scheme: str, value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(5, 1056, dtype=dtype, device=DEVICE)
    assert run(weight, scheme).nonfinite.item() == 0
    weight[4, 1055] = value
    assert run(weight, scheme).nonfinite.item() == 1


def test_fp32_that_overflows_bf16_is_flagged() -> None:
    weight = torch.full((2, 32), torch.finfo(FP32).max, device=DEVICE)
    assert quantize_int4(weight, 32).nonfinite.item() == 1
    assert quantize_int4(weight / 32, 32, grid=FP32).nonfinite.item() == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_strided_weights(scheme: str) -> None:
    torch.manual_seed(4)
    wide = torch.randn(32, 128, device=DEVICE).to(BF16)
    for view in (wide[:5, 32:], wide[::8], wide[:, :5].t(), wide[5:6]):
        check(view, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_rows(scheme: str) -> None:
    found = run(torch.empty(0, 64, dtype=BF16, device=DEVICE), scheme, dequantize=True)
    assert found.values.shape[0] == found.scale.shape[0] == 0
    assert found.dequantized is not None and found.dequantized.shape == (0, 64)
    assert found.nonfinite.item() == 0


@pytest.mark.parametrize(("group_size", "cols"), [(32, 96), (8, 8), (24, 72), (128, 1408)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_dequantize_int4(group_size: int, cols: int, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    packed = torch.randint(-(2**31), 2**31 - 1, (7, cols // 8), dtype=torch.int32, device=DEVICE)
    scale = torch.randn(7, cols // group_size, device=DEVICE).to(dtype)
    found = dequantize_int4(packed, scale)
    assert torch.equal(found, int4_reference(packed, scale))
    strided = torch.stack((packed, packed), dim=2)[:, :, 0]
    assert torch.equal(dequantize_int4(strided, scale), found)
    assert dequantize_int4(packed[:0], scale[:0]).shape == (0, cols)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("cols", [1, 100, 2050], ids=str)
def test_dequantize_rows(dtype: torch.dtype, cols: int) -> None:
    torch.manual_seed(6)
    codes = torch.randint(0, 256, (5, cols), dtype=torch.uint8, device=DEVICE)
    codes[(codes & 0x7F) == 0x7F] = 0  # the NaN of e4m3
    values, scale = codes.view(dtype), torch.rand(5, 1, device=DEVICE)
    assert torch.equal(dequantize_rows(values, scale), dequantize_tokens(values, scale))
    wide = torch.cat((codes, codes), dim=1).view(dtype)[:, :cols]
    assert torch.equal(dequantize_rows(wide, scale), dequantize_tokens(values, scale))
    assert dequantize_rows(values[:0], scale[:0]).shape == (0, cols)


def test_refuses_what_it_cannot_read() -> None:
    weight = torch.ones(4, 64, dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="multiple of group_size 48"):
        quantize_int4(weight, 48)
    with pytest.raises(ValueError, match="multiple of 8"):
        quantize_int4(weight, 4)
    with pytest.raises(ValueError, match="float16"):
        quantize_rows(weight.half(), torch.int8)
    with pytest.raises(ValueError, match="grid"):
        quantize_rows(weight, torch.int8, grid=FP32)
    with pytest.raises(ValueError, match="3 dimensions"):
        quantize_rows(weight[None], torch.float8_e4m3fn)
    packed = torch.zeros(4, 8, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="groups"):
        dequantize_int4(packed, torch.ones(4, 3, dtype=BF16, device=DEVICE))
    with pytest.raises(ValueError, match="FP32"):
        dequantize_rows(packed.to(torch.int8), torch.ones(4, 1, dtype=BF16, device=DEVICE))
