"""On GPUs, quantize with the fused Triton kernels instead of several PyTorch steps, if both give equal bytes.

`fused_quantizer` compares the two on the device, once for each kind of weight. The comparison covers every BF16 number
(or FP32 numbers of all magnitudes), ties between codes, and an odd shape. If a byte differs, `fused_quantizer` warns
and returns the PyTorch steps.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from qarl.kernels.device import is_gpu
from qarl.quant.scheme import QuantArgs
from qarl.quant.timing import phase

Quantizer = Callable[[Tensor, QuantArgs], tuple[Tensor, Tensor, Tensor]]
"""A function that quantizes a weight [N, K] and returns (values, scale, flag). The flag, int32 [1], is nonzero if the
weight holds a NaN or an Inf."""


def fused_quantizer(weight: Tensor, args: QuantArgs, eager: Quantizer) -> Quantizer:
    """Return the fused quantizer for a GPU's `weight` if its bytes equal those of `eager`. Otherwise return `eager`."""
    if not is_gpu(weight.device) or weight.dtype == torch.float16 or importlib.util.find_spec("triton") is None:
        return eager
    equal = weight.is_meta or _checked(weight.dtype, weight.device, args, eager)
    return _run_fused if equal else eager


@cache
def _checked(dtype: torch.dtype, device: torch.device, args: QuantArgs, eager: Quantizer) -> bool:
    difference = find_difference(_run_fused, eager, dtype, device, args)
    if difference is not None:
        warnings.warn(
            f"the fused quantizer is not used on {device}: for {args.num_bits}-bit {args.type} of {dtype} {difference}",
            stacklevel=2,
        )
    return difference is None


def find_difference(
    fused: Quantizer, eager: Quantizer, dtype: torch.dtype, device: torch.device, args: QuantArgs
) -> str | None:
    """Return where `fused` and `eager` first differ on the weights of `check_weights`, or None if they never do."""
    for what, weight in check_weights(dtype, device, args.group_size or 64):
        for name, a, b in zip(("values", "scale", "flag"), fused(weight, args), eager(weight, args), strict=True):
            same = a.dtype == b.dtype and a.shape == b.shape
            if not same or not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
                return f"the {name} of {what} differ"
    return None


def check_weights(dtype: torch.dtype, device: torch.device, group_size: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    bits = torch.arange(1 << 16, dtype=torch.int32)
    numbers = bits.to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    shuffled = numbers[torch.randperm(len(numbers), generator=generator)]
    if dtype == torch.float32:
        shuffled = shuffled.float() * (1 + torch.rand(len(shuffled), generator=generator) / 256)
        numbers, shuffled = numbers.float(), shuffled.clamp(-3.3e38, 3.3e38)
    width = 24 * group_size
    rows = len(numbers) // width
    normal = torch.randn(67, 3 * group_size, generator=generator).mul_(0.02)
    normal[5:7] = 0
    halves = torch.arange(-15, 16).div(2).repeat(group_size // 31 + 1)[:group_size].expand(4, -1)
    return [
        (what, weight.to(dtype).contiguous().to(device))
        for what, weight in (
            ("all numbers in order", numbers[: rows * width].view(rows, width)),
            ("all numbers shuffled", shuffled[: rows * width].view(rows, width)),
            ("normal numbers", normal),
            ("ties", halves),
        )
    ]


def _run_fused(weight: Tensor, args: QuantArgs) -> tuple[Tensor, Tensor, Tensor]:
    from qarl.kernels.triton import quantize as kernels

    with phase("quantize"):
        if args.num_bits == 4:
            made = kernels.quantize_int4(weight, args.group_size or weight.shape[1], grid=weight.dtype)
        else:
            dtype = torch.int8 if args.type == "int" else torch.float8_e4m3fn
            made = kernels.quantize_rows(weight, dtype, grid=weight.dtype)
    return made.values, made.scale, made.nonfinite
