"""The rollout engine's own operators, callable from the trainer: same operation, same operands, same bits.

vLLM registers them as `torch.ops._C.*`. They know no autograd; `qarl.quant.linear` wraps them. This file and
`qarl.rollout` are the only places that import vllm.

W4A16 on CPU is `cpu_gemm_wna16`: each weight becomes `bf16(float(q - 8) * float(scale))`, products are summed in
FP32 in order of K without split, and rounded once, so a row's result depends neither on the number of rows nor on
what is fused along N. Limits: K and N multiples of 32, even group size, BF16 or FP16 activations with scales of the
same dtype.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

from qarl.kernels.int4 import VALUES_PER_INT32, unpack_int4
from qarl.vllm_process import configure_vllm_process

_CHANNELS_PER_BLOCK = 16  # cpu_gemm_wna16 reads 16 output channels at a time


class PreparedWNA16(NamedTuple):
    """`weight` int32 [N/16, 2K] in blocks of 16 output channels; `scales` BF16 [K/g, N]."""

    weight: torch.Tensor
    scales: torch.Tensor


@cache
def _cpu_ops_missing() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return "this vLLM build has no cpu_gemm_wna16 (it needs a CPU with AVX512)"
    return None


class VllmCpuWNA16Linear:
    """`cpu_gemm_wna16`, which vLLM's CPUWNA16LinearKernel runs in every W4A16 linear on CPU."""

    name = "vllm_cpu_wna16"

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        if scheme_name != "w4a16":
            return f"serves w4a16, not {scheme_name}"
        if shape[0] % 32 or shape[1] % 32:
            return f"needs N and K in multiples of 32, not {list(shape)}"
        return _cpu_ops_missing()

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWNA16:
        """The kernel's layout, equal to what vLLM's `process_weights_after_loading` makes of the same tensors."""
        values = unpack_int4(tensors["weight_packed"]).add_(8).view(torch.uint8)
        out_features, in_features = values.shape
        pairs = values.view(out_features // _CHANNELS_PER_BLOCK, _CHANNELS_PER_BLOCK // 2, 2, in_features)
        packed = pairs[:, :, 0].bitwise_or(pairs[:, :, 1] << 4).transpose(1, 2).contiguous()
        weight = packed.view(torch.int32).view(-1, in_features * _CHANNELS_PER_BLOCK // VALUES_PER_INT32)
        return PreparedWNA16(weight, tensors["weight_scale"].t().contiguous())

    @staticmethod
    def linear(x: torch.Tensor, prepared: PreparedWNA16, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, K] BF16, any strides -> [M, N] BF16."""
        if x.stride(1) != 1:  # the operator reads rows at their stride and takes their elements to be adjacent
            x = x.contiguous()
        output = x.new_empty(x.shape[0], prepared.scales.shape[1])
        torch.ops._C.cpu_gemm_wna16(
            x, prepared.weight, output, prepared.scales, None, None, bias, VALUES_PER_INT32, _isa_hint()
        )
        return output


def _isa_hint() -> str:
    """vLLM's own rule for BF16 scales: matrix tiles where the CPU has them, else vectors."""
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"
