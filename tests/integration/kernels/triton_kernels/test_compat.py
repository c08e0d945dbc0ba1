"""Rounding and casts that the kernels share: every BF16 and e4m3 number, ties, subnormals, infinities and NaN."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton_rig import DEVICE

from qarl.kernels.triton.numbers import (
    LAUNCH,
    dot,
    e4m3_bits,
    e4m3_value,
    has_e4m3,
    round_bf16,
    to_bf16,
    to_fp32,
)

HARDWARE = sorted({False, has_e4m3(torch.device(DEVICE))})


@triton.jit
def elementwise_kernel(
    x_ptr, y_ptr, n, WHAT: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    if WHAT == "round_bf16":
        y = round_bf16(x)
    elif WHAT == "to_bf16":
        y = to_bf16(x)
    elif WHAT == "to_fp32":
        y = to_fp32(x)
    elif WHAT == "e4m3_bits":
        y = e4m3_bits(x, HARDWARE)
    else:
        y = e4m3_value(x, HARDWARE)
    tl.store(y_ptr + offsets, y, mask=offsets < n)


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr, ACCUMULATOR: tl.constexpr):
    index = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    acc = tl.zeros([SIZE, SIZE], ACCUMULATOR)
    tl.store(c_ptr + index, dot(tl.load(a_ptr + index), tl.load(b_ptr + index), acc))


def apply(what: str, x: torch.Tensor, dtype: torch.dtype, hardware: bool = False) -> torch.Tensor:
    x = x.to(DEVICE)
    y = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    elementwise_kernel[(triton.cdiv(x.numel(), 1024),)](
        x, y, x.numel(), what, hardware, BLOCK=1024, **LAUNCH
    )
    return y.cpu()


def fp32_near_ties() -> torch.Tensor:
    """All 65536 BF16 numbers, NaNs among them, and FP32 numbers on both sides of them and of their midpoints."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] | low[None, :]).flatten()
    return bits.to(torch.int32).view(torch.float32)


def same(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit but for which NaN."""
    nan = expected.isnan()
    integer = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    return bool((output.isnan() == nan).all()) and torch.equal(
        output[~nan].view(integer), expected[~nan].view(integer)
    )


def test_bf16_rounds_half_to_even() -> None:
    x = fp32_near_ties()
    assert same(apply("to_bf16", x, torch.bfloat16), x.bfloat16())
    assert same(apply("to_fp32", x.bfloat16(), torch.float32), x.bfloat16().float())
    assert same(apply("round_bf16", x, torch.float32), x.bfloat16().float())


@pytest.mark.parametrize("hardware", HARDWARE)
def test_e4m3(hardware: bool) -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert same(apply("e4m3_value", codes, torch.float32, hardware), values)
    finite = values[~values.isnan()].sort().values
    midpoints = (finite[1:] + finite[:-1]) / 2
    around = torch.cat(
        [finite, midpoints, midpoints.nextafter(midpoints * 2), midpoints.nextafter(midpoints * 0)]
    )
    tiny = torch.tensor([1e-45, -1e-45, 1e-38, -3e-5, 0.0, -0.0, 2.0**-10, 2.0**-9, float("nan")])
    x = torch.cat([around, tiny, torch.randn(5000), torch.randn(5000) * 0.01]).clamp(-448, 448)
    codes = apply("e4m3_bits", x, torch.uint8, hardware)
    expected = x.to(torch.float8_e4m3fn)
    assert torch.equal(codes[~x.isnan()], expected.view(torch.uint8)[~x.isnan()])
    assert codes.view(torch.float8_e4m3fn).float()[x.isnan()].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [(torch.bfloat16, tl.float32), (torch.int8, tl.int32)],
    ids=["bf16", "int8"],
)
def test_dot(dtype: torch.dtype, accumulator: tl.dtype) -> None:
    """Whole numbers of few bits, whose sums are exact in any order."""
    torch.manual_seed(0)
    a, b = (torch.randint(-100, 100, (32, 32), device=DEVICE).to(dtype) for _ in range(2))
    out_dtype = torch.float32 if dtype == torch.bfloat16 else torch.int32
    c = torch.empty(32, 32, dtype=out_dtype, device=DEVICE)
    dot_kernel[(1,)](a, b, c, SIZE=32, ACCUMULATOR=accumulator, **LAUNCH)
    assert torch.equal(c.double(), a.double() @ b.double())
