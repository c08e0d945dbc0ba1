"""Low-bit linears on CPU from PyTorch's operators. W8A8 and FP8 give the same bits as vLLM, but do not need it.

W4A8 and `dequantized` are QaRL's own, which the trainer and the rollout engine both call (`quant.kernels`).

int8: sums are exact. The kernel quantizes activations as vLLM does and scales in the same order in FP32: (sum * weight
scale) * token scale, with the bias added by a fused multiply-add.

fp8: vLLM's ChannelWiseTorchFP8ScaledMMLinearKernel calls `torch._scaled_mm` with unit scales and FP32 output, and
computes (sum * token scale) * weight scale + bias. Here an FP32 `matmul` of the upcast operands replaces `_scaled_mm`
if it adds in the same order. It is faster, but needs four bytes of memory per weight. Both pad fewer than 17 rows to
17, because an FP32 `matmul` of fewer rows adds in a different order.

W4A8 (`qarl_cpu_w4a8`): int4 weights in groups along K, int8 activations with one scale per token. vLLM on CPUs would
run such a checkpoint with BF16 activations, so it has no kernel to follow. The arithmetic is:

    q, s = quantize_int8(x)                             as in vLLM's W8A8 (`qarl.kernels.reference`)
    sum  = sum over k in group g of q[m, k] code[n, k]  an integer, exact
    acc  = acc + float(sum) * scale[n, g]               FP32, one group after another, each step rounded
    y    = bf16(acc * s[m] + b[n])                      FP32, each step rounded

No step depends on the number of rows, on fused layers or on threads: sums are exact, and everything else is
elementwise. Fused multiply-adds are avoided, because PyTorch uses them only in some lanes of a vector.

Dequantized (`dequantized`): W4A16 by a BF16 product. The weight is dequantized once per publish. BF16 products of fewer
than 17 rows may add in a different order, so fewer rows are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F

from qarl.kernels.base import LinearKernel, PreparedWeight, bf16_bytes, eight_bit_bytes
from qarl.kernels.int4 import dequantize_int4, unpack_int4
from qarl.kernels.reference import FP8, quantize_fp8, quantize_int8
from qarl.schemes.base import FP8_FP8, INT4_BF16, INT4_INT8, INT8_INT8, Scheme
from qarl.schemes.kernel_choice import KernelChoice

ROWS_AT_A_TIME = 256
"""Rows scaled at a time, while their FP32 products are cached. At 4096 rows this saves a third of the time."""
_MIN_ROWS = 17
_W4A8_ROWS_AT_A_TIME = 64


def int8_unavailable(device: torch.device) -> str | None:
    """Return why int8 kernels cannot be used, or None. Without VNNI, sums have large errors (up to half their std)."""
    if device.type != "cpu":
        return f"runs on cpu, not on {device.type}"
    if not torch.cpu._is_vnni_supported():
        return "this CPU has no AVX512 VNNI, without which oneDNN's int8 sums are not exact"
    return None


def int8_linear(
    multiply: Callable[[torch.Tensor, torch.Tensor], object],
    x: tuple[torch.Tensor, torch.Tensor],
    out_features: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return [M, N] BF16 from `x`: int8 activations [M, K] and their FP32 scales [M, 1].

    `multiply(values, out)` gets int8 rows. It must write their integer sums times the weight scale to `out`, FP32.
    """
    values, scale = x
    output = values.new_empty(values.shape[0], out_features, dtype=torch.bfloat16)
    buffer = values.new_empty(
        min(values.shape[0], ROWS_AT_A_TIME), out_features, dtype=torch.float32
    )
    fp32_bias = None if bias is None else bias.float()
    for start in range(0, values.shape[0], ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        product = buffer[: values[rows].shape[0]]
        multiply(values[rows], product)
        if fp32_bias is None:
            product.mul_(scale[rows])
        else:
            torch.addcmul(fp32_bias, product, scale[rows], out=product)
        output[rows] = product
    return output


def int_mm(prepared: PreparedWeight) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function for `int8_linear` that multiplies with `torch._int_mm`. The weight may have any strides."""

    def multiply(rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch._int_mm(rows, prepared.weight)).mul_(prepared.scale)

    return multiply


class TorchInt8Linear(LinearKernel):
    """W8A8 with `torch._int_mm`."""

    operands = INT8_INT8
    name = "torch_int8"
    quantize_input = staticmethod(quantize_int8)

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        return int8_unavailable(device)

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return eight_bit_bytes(shape)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Transpose the weight to int8 [K, N]."""
        return PreparedWeight(
            tensors["weight"].t().contiguous(), tensors["weight_scale"].t().contiguous()
        )

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return int8_linear(int_mm(prepared), quantize_int8(x), prepared.weight.shape[1], bias)


class TorchFP8Linear(LinearKernel):
    """FP8 with the bits of vLLM's ChannelWiseTorchFP8ScaledMMLinearKernel, by an FP32 matmul or by `_scaled_mm`.

    The matmul is used if it gives vLLM's bits on this machine.
    """

    operands = FP8_FP8
    multiplies_experts = True
    name = "vllm_cpu_fp8"
    quantize_input = staticmethod(quantize_fp8)

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        return None if device.type == "cpu" else f"runs on cpu, not on {device.type}"

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        rows, columns = shape
        return 4 * rows * columns + 4 * rows

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Upcast `weight` [N, K] to FP32 for the matmul. For `_scaled_mm` return it unchanged."""
        weight = tensors["weight"]
        same_bits = _fp32_matmul_equals_scaled_mm(weight.shape[1])
        return PreparedWeight(
            upcast_e4m3(weight) if same_bits else weight, tensors["weight_scale"].t().contiguous()
        )

    @staticmethod
    def prepare_stack(tensors: Mapping[str, torch.Tensor]) -> list[PreparedWeight]:
        """Prepare all matrices of a stack [E, N, K] at once. Each result is a view of new memory, because a transport
        may reuse that of `tensors`."""
        weight = tensors["weight"]
        scale = tensors["weight_scale"].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        weight = (
            upcast_e4m3(weight)
            if _fp32_matmul_equals_scaled_mm(weight.shape[2])
            else weight.clone()
        )
        return [PreparedWeight(*both) for both in zip(weight.unbind(), scale.unbind(), strict=True)]

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        values, scale = quantize_fp8(x)
        padding = (0, 0, 0, max(_MIN_ROWS - x.shape[0], 0))
        if prepared.weight.dtype == FP8:
            product = _scaled_mm(
                F.pad(values.view(torch.uint8), padding).view(FP8), prepared.weight
            )
        else:
            product = F.linear(F.pad(values.float(), padding), prepared.weight)
        y = product[: x.shape[0]].mul_(scale).mul_(prepared.scale)
        return (y if bias is None else y.add_(bias)).to(x.dtype)


def upcast_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return finite `values`, float8_e4m3fn, in FP32. PyTorch's conversion takes three times as long on a CPU.

    If e4m3's exponent and mantissa bits are moved to their places in FP16, the number is 2^8 times smaller.
    """
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)  # two copies of the sign
    return bits.bitwise_and_(~0x4000).view(torch.float16).float().mul_(256)


def _scaled_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply e4m3 [M, K] by the transpose of e4m3 [N, K], with unit scales; return FP32 [M, N]."""
    unit_scale = torch.ones(1, dtype=torch.float32)
    return torch._scaled_mm(
        x, weight.t(), scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.float32
    )


@cache
def _fp32_matmul_equals_scaled_mm(features: int) -> bool:
    """Return whether an FP32 matmul and `_scaled_mm` add `features` products in the same order.

    This is tested once on this machine, with numbers that a different order would round differently. The orders differ
    if `_scaled_mm` runs oneDNN's slow reference code, which adds one product after another. MKL's matmul on Intel CPUs
    adds more than 384 products in blocks.
    """
    generator = torch.Generator().manual_seed(0)
    for rows in (_MIN_ROWS, 130):
        x, weight = (
            torch.randn(n, features, generator=generator, dtype=torch.float32).mul_(16).to(FP8)
            for n in (rows, 72)
        )
        if not torch.equal(_scaled_mm(x, weight), F.linear(x.float(), weight.float())):
            return False
    return True


class CpuW4A8Linear(LinearKernel):
    """W4A8 with `torch._int_mm`, one product per group."""

    operands = INT4_INT8
    options = (KernelChoice.ENGINE, KernelChoice.QARL)
    name = "qarl_cpu_w4a8"
    quantize_input = staticmethod(quantize_int8)

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        return int8_unavailable(device)

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        rows, columns = shape
        groups = columns // (scheme.group_size or columns)
        return rows * columns + 4 * rows * groups

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Unpack the codes to int8 [K/g, g, N], and transpose the scales to FP32 [K/g, N]."""
        scale = tensors["weight_scale"]
        codes = unpack_int4(tensors["weight_packed"]).view(*scale.shape, -1)  # [N, K/g, g]
        return PreparedWeight(codes.permute(1, 2, 0).contiguous(), scale.t().float().contiguous())

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [M, K] BF16, any strides -> [M, N] BF16."""
        codes, scale = prepared
        values, token_scale = quantize_int8(x)
        group, channels = codes.shape[1:]
        output = x.new_empty(x.shape[0], channels)
        fp32_bias = None if bias is None else bias.float()
        for start in range(0, x.shape[0], _W4A8_ROWS_AT_A_TIME):
            rows = slice(start, start + _W4A8_ROWS_AT_A_TIME)
            total = torch.zeros(values[rows].shape[0], channels, dtype=torch.float32)
            for number, (group_codes, its_scale) in enumerate(zip(codes, scale, strict=True)):
                sums = torch._int_mm(
                    values[rows, number * group : (number + 1) * group], group_codes
                )
                total.add_(sums.float().mul_(its_scale))
            total.mul_(token_scale[rows])
            output[rows] = total if fp32_bias is None else total.add_(fp32_bias)
        return output


class DequantizedW4A16Linear(LinearKernel):
    """W4A16 weights, multiplied in BF16. This is no low-bit product: it is for debugging and for small machines."""

    operands = INT4_BF16
    options = (KernelChoice.DEQUANTIZED,)
    holds_dequantized = True
    name = "dequantized"

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        return None if device.type == "cpu" else f"runs on cpu, not on {device.type}"

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return bf16_bytes(shape)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Dequantize the weight to BF16 [N, K], with the operand of vLLM's W4A16 kernel. There are no scales left."""
        scale = tensors["weight_scale"]
        return PreparedWeight(dequantize_int4(tensors["weight_packed"], scale), scale.new_empty(0))

    @staticmethod
    def dequantized_weight(prepared: PreparedWeight) -> torch.Tensor:
        return prepared.weight

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x.shape[0]
        return F.linear(F.pad(x, (0, 0, 0, max(_MIN_ROWS - rows, 0))), prepared.weight, bias)[:rows]
