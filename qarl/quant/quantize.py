"""The only quantizer. Its tensors feed the trainer's GEMM, the wire to vLLM and the checkpoint on disk.

The results equal those of compressed-tensors (`calculate_qparams`, `quantize`, `pack_to_int32`) bit for bit. Every step
is rounded to the weight's dtype:

- scale = absmax / half the range (7.5 for int4, 127.5 for int8, 448 for e4m3: `Scheme.grid`), unless a scheme has a
  rule of its own (`Scheme.scales`). A scale of zero becomes the dtype's eps, so an all-zero group has codes of zero and
  a finite scale.
- code = weight / scale, clamped, then rounded half to even.
- int4 codes are stored with offset 8, eight in an int32, lowest nibble first.
- 8-bit scales are upcast to FP32 for the wire, because vLLM stores them in FP32.

For int4, integer arithmetic on the bits gets the same results in a third of the time. Do not compile this code, because
a compiler that keeps BF16 intermediates in FP32 would change the results. It needs a little-endian machine. On GPUs one
fused Triton kernel replaces it. `fused_is_exact` compares the two on the device, once for each kind of weight. If a
byte differs, it warns, and the PyTorch steps run.

`QuantizedTensor` holds the result: the same tensors that are sent to the engine and written to disk. Stacks of experts
go through the same steps (`quantize_stack` in `qarl.quant.experts`).
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qarl.errors import UserError
from qarl.kernels.base import is_gpu
from qarl.kernels.int4 import dequantize_int4
from qarl.schemes import Grid, Scheme


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A [N, K] weight that was quantized with `scheme`. `tensors`: the wire tensors, by compressed-tensors' names.

    w4a16, w4a8   `weight_packed` int32 [N, K/8], `weight_scale` [N, K/group_size] in the dtype of the original weight
                  (BF16 on the wire), and `weight_shape` int64 [2], always on the CPU
    w8a8, fp8     `weight` int8 or float8_e4m3fn [N, K], and `weight_scale` FP32 [N, 1]
    """

    scheme: Scheme
    shape: tuple[int, int]
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, Tensor]
    ) -> QuantizedTensor:
        """Add `weight_shape`, which other layouts and shards leave out, to int4 `tensors`."""
        if "weight_packed" in tensors:
            tensors = {
                **tensors,
                "weight_shape": torch.tensor(shape, dtype=torch.int64, device="cpu"),
            }
        return cls(scheme, shape, dict(tensors))

    def named(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield checkpoint names, such as `<prefix>.weight_packed`, and tensors for the layer called `prefix`."""
        for name, tensor in self.tensors.items():
            yield f"{prefix}.{name}", tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, including the 16 bytes of `weight_shape`."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight [N, K] that the low-bit GEMM multiplies by, as `dtype`. The backward uses it as Ŵ.

        It equals compressed-tensors' `dequantize`: the product of code and scale, rounded to the scale's dtype, then
        cast to `dtype`. For a BF16 weight and BF16 output every scheme rounds once: `bf16(float(code) * float(scale))`.
        For int4 this is the operand of vLLM's CPU kernel. 8-bit GEMMs multiply the codes themselves and apply the scale
        to the sum.
        """
        if "weight_packed" in self.tensors:
            return dequantize_int4(
                self.tensors["weight_packed"], self.tensors["weight_scale"], dtype
            )
        return self.tensors["weight"].float().mul_(self.tensors["weight_scale"]).to(dtype)


class FloatBits(NamedTuple):
    """How to read a float dtype as integers.

    `integer`: the integer dtype. `magnitude_mask`: the mask that drops the sign. `nonfinite`: the smallest magnitude
    that is Inf or NaN.
    """

    integer: torch.dtype
    magnitude_mask: int
    nonfinite: int


FLOAT_BITS = {
    torch.bfloat16: FloatBits(torch.int16, 0x7FFF, 0x7F80),
    torch.float16: FloatBits(torch.int16, 0x7FFF, 0x7C00),
    torch.float32: FloatBits(torch.int32, 0x7FFFFFFF, 0x7F800000),
    torch.float8_e4m3fn: FloatBits(torch.uint8, 0x7F, 0x7F),
}

_AT_ONCE = 1 << 24
"""Numbers that `has_nonfinite` looks at together, so that a large tensor needs no large intermediate one."""


def has_nonfinite(tensor: Tensor) -> Tensor:
    """Return, as 0-d bool, whether a float tensor contains NaN or Inf. Read as integers, the bits of float magnitudes
    have the order of the magnitudes, so checking the maximum is enough. This is ten times as fast as `isfinite`."""
    bits = FLOAT_BITS.get(tensor.dtype)
    if bits is None:
        return ~torch.isfinite(tensor).all()
    parts = tensor.contiguous().view(bits.integer).view(-1).split(_AT_ONCE)
    largest = torch.stack([(part & bits.magnitude_mask).amax() for part in parts]).amax()
    return largest >= bits.nonfinite


def holds_zero(tensor: Tensor) -> bool:
    """Return whether a contiguous float tensor holds a zero of either sign. The smallest magnitude's bits are read as
    an integer, as in `has_nonfinite`."""
    bits = FLOAT_BITS[tensor.dtype]
    magnitudes = tensor.view(bits.integer) & bits.magnitude_mask
    return tensor.numel() > 0 and not magnitudes.amin().item()


_ROUNDERS = {
    torch.bfloat16: (128.0 + 8, 0x4300),
    torch.float16: (1024.0 + 8, 0x6400),
    torch.float32: (1.5 * 2**23 + 8, 0x4B400000),
}
"""dtype -> (c + 8, bits of c). Near the number c, the representable floats are exactly the integers. c is a power of
two, or for float32 1.5 times a power of two. The low four bits of c are zero."""


@torch.no_grad()
def quantize(weight: Tensor, scheme: Scheme, *, name: str = "weight") -> QuantizedTensor:
    """Return `weight` [N, K] (bfloat16, float16 or float32; any strides) quantized with `scheme`. Errors show `name`.

    Pass the weight that the forward uses: for an FP32 master and a BF16 forward, the master's BF16 cast. Scales of int4
    groups have the dtype of `weight`, which must be BF16 for the wire. Scales of 8-bit channels are FP32.

    Raise UserError if the shape does not fit the scheme, or if `weight` contains a NaN or an Inf (this check costs one
    device synchronization).
    """
    quantized, nonfinite = quantize_unchecked(weight, scheme, name=name)
    if nonfinite.item():
        raise nonfinite_error(weight, name)
    return quantized


@torch.no_grad()
def quantize_unchecked(
    weight: Tensor, scheme: Scheme, *, name: str
) -> tuple[QuantizedTensor, Tensor]:
    """Do the same as `quantize` without waiting for the device.

    Return the tensors and a flag, int32 [1]. If it is not 0, `weight` has a NaN or an Inf, and the tensors are invalid.
    """
    rows, cols = weight.shape
    problem = scheme.check_shape(name, rows, cols)
    if problem:
        raise UserError(
            problem,
            where=f"parameter {name}",
            fix="add the layer to quant.ignore"
            + (
                ", or set quant.group_size to a divisor of the input features"
                if scheme.group_size
                else ""
            ),
        )
    weight = weight.detach()
    fused = (
        is_gpu(weight.device)
        and weight.dtype != torch.float16
        and importlib.util.find_spec("triton") is not None
    )
    exact = fused and (weight.is_meta or fused_is_exact(weight.dtype, weight.device, scheme))
    values, scale, nonfinite = (_run_fused if exact else _eager)(weight, scheme)
    codes = "weight_packed" if scheme.packs_codes else "weight"
    return QuantizedTensor.of(
        scheme, (rows, cols), {codes: values, "weight_scale": scale}
    ), nonfinite


def nonfinite_error(weight: Tensor, name: str) -> UserError:
    """Return the error for the parameter `name`, which has a NaN or an Inf. `weight`: the values to count them in."""
    count = int((~torch.isfinite(weight)).sum())
    return UserError(
        f"{count} of the {weight.numel()} values of {name} are NaN or Inf",
        where=f"parameter {name}",
        why="such a weight cannot be quantized, and a NaN in the engine would stay in its KV cache",
        fix="lower optim.lr or actor.grad_clip, or check the checkpoint that the run started from",
    )


def _eager(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Return values and scales as on the wire, and a flag, int32 [1].

    The flag is 1 if a weight is NaN or Inf. Values and scales are then invalid.
    """
    rows, cols = weight.shape
    grid = scheme.grid
    assert grid is not None
    with phase("quantize"):
        groups = weight.contiguous().view(rows, -1, scheme.group_size or cols)
        absmax = _absmax(groups)
        nonfinite = (~torch.isfinite(absmax)).any().to(torch.int32).view(1)
        by_own_rule = scheme.scales(groups)
        scale = _scale(absmax, grid.half_range) if by_own_rule is None else _no_zeros(by_own_rule)
        if not scheme.packs_codes:
            dtype = codes_dtype(scheme)
            to_codes = _float_codes if dtype.is_floating_point else _int_codes
            values = to_codes(groups.view(rows, cols), scale, grid).to(dtype)
            return values, scale.float(), nonfinite
        codes = _codes(groups, scale, grid).view(rows, cols)
    with phase("pack"):
        return _pack(codes), scale, nonfinite


def _absmax(groups: Tensor) -> Tensor:
    """Return the largest magnitude, [N, K/g], of each group in `groups` [N, K/g, g]. NaN counts as larger than Inf."""
    bits = FLOAT_BITS[groups.dtype]
    return (groups.view(bits.integer) & bits.magnitude_mask).amax(-1).view(groups.dtype)


def _scale(absmax: Tensor, half_range: float) -> Tensor:
    """Return absmax / half_range, or eps if this is 0.

    The divisor is a tensor. On CUDA, PyTorch multiplies by the reciprocal of a Python number instead of dividing, which
    can change the last bit in FP32.
    """
    return _no_zeros(absmax.div_(absmax.new_full((), half_range)))


def _no_zeros(scale: Tensor) -> Tensor:
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def codes_dtype(scheme: Scheme) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, scheme.codes)
    return dtype


def _codes(groups: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Return code + 8, in 0..15, as int16 [N, K/g, g]."""
    rounder, base = _ROUNDERS[groups.dtype]
    rounded = (
        torch.div(groups, scale.unsqueeze(-1)).add_(rounder).view(FLOAT_BITS[groups.dtype].integer)
    )
    zero = base + 8
    rounded.clamp_(zero + grid.lowest, zero + grid.highest)
    return rounded.bitwise_and_(0xF).to(torch.int16)


def _int_codes(rows: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Return integers [N, K] from `rows` [N, K] and `scale` [N, 1]. All have the same float dtype."""
    return torch.div(rows, scale).round_().clamp_(grid.lowest, grid.highest)


def _float_codes(rows: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Return numbers [N, K] that the cast to the codes' dtype rounds. As in compressed-tensors, a zero point of 0 is
    added, which turns -0.0 into 0.0.

    The clamp is needed because some releases of PyTorch cast an overflow to NaN instead of the largest value.
    """
    return torch.div(rows, scale).add_(0.0).clamp_(grid.lowest, grid.highest)


def _pack(codes: Tensor) -> Tensor:
    """Pack int16 [N, K] in 0..15 to int32 [N, K/8]. An int64 moves four codes at a time."""
    lanes = codes.view(torch.int64)
    lanes.bitwise_or_(lanes >> 12)
    lanes.bitwise_or_(lanes >> 24)
    return lanes.view(torch.int16)[:, ::4].contiguous().view(torch.int32)


def _run_fused(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as `_eager` in one pass on a GPU."""
    from qarl.kernels.triton.quantize import quantize_int4, quantize_rows

    with phase("quantize"):
        if scheme.packs_codes:
            return quantize_int4(weight, scheme.group_size or weight.shape[1])
        return quantize_rows(weight, codes_dtype(scheme))


@cache
def fused_is_exact(dtype: torch.dtype, device: torch.device, scheme: Scheme) -> bool:
    """Return whether the fused kernel gives the bytes of the PyTorch steps for all of `check_weights`. Warn if not."""
    for what, weight in check_weights(dtype, scheme.group_size or 64).items():
        fused = _run_fused(weight.to(device), scheme)
        eager = _eager(weight.to(device), scheme)
        pairs = zip(fused, eager, strict=True)
        if not all(a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)) for a, b in pairs):
            kind = f"{scheme.name} of {dtype}"
            warnings.warn(
                f"the fused quantizer is not used on {device}: {kind} differ for {what}",
                stacklevel=2,
            )
            return False
    return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_weights(dtype: torch.dtype, group_size: int) -> dict[str, Tensor]:
    """Return weights [N, K] for `fused_is_exact`: every BF16 number (or FP32 numbers of all magnitudes) in order and
    shuffled, an odd shape, and ties between codes."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    shuffled = numbers[torch.randperm(len(numbers), generator=generator)].float()
    if dtype == torch.float32:
        shuffled.mul_(1 + torch.rand(len(shuffled), generator=generator) / 256).clamp_(
            -3.3e38, 3.3e38
        )
    width = 24 * group_size
    whole = len(numbers) // width * width
    normal = torch.randn(67, 3 * group_size, generator=generator).mul_(0.02)
    normal[5:7] = 0
    weights = {
        "all numbers in order": numbers[:whole].view(-1, width),
        "all numbers shuffled": shuffled[:whole].view(-1, width),
        "normal numbers": normal,
        "ties": torch.arange(-15, 16)
        .div(2)
        .repeat(group_size // 31 + 1)[:group_size]
        .expand(4, -1),
    }
    return {what: weight.to(dtype).contiguous() for what, weight in weights.items()}


_seconds: ContextVar[dict[str, float] | None] = ContextVar("qarl_quant_phases", default=None)


@contextmanager
def measure_phases() -> Iterator[dict[str, float]]:
    """Collect the seconds of every phase in the block: `quantize` (scales and codes), `pack` (codes into int32) and
    `prepare` (the kernel's layout).

    Phases in an inner `measure_phases` count only there. On a GPU only the time to queue the kernels is measured.
    """
    seconds = {"quantize": 0.0, "pack": 0.0, "prepare": 0.0}
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time of the block as phase `name`. Outside of `measure_phases` this costs only a look-up."""
    seconds = _seconds.get()
    if seconds is None:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - start
