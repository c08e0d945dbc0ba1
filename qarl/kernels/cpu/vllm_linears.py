"""The rollout engine's CPU operators, for the trainer. The same operands give the engine's bits.

vLLM registers them as `torch.ops._C.*`. They have no autograd. `qarl.quant.linear` adds it. A row's result does not
depend on other rows.

W4A16 is `cpu_gemm_wna16`. Each weight becomes `bf16(float(q - 8) * float(scale))`. Products are summed in FP32 in the
order of K, and rounded once. So fusing layers along N does not change a result. K and N must be multiples of 32, and
the group size even.

W8A8 is a oneDNN product. vLLM's code around it (csrc/cpu/dnnl_kernels.cpp) applies the token scales, which takes a
quarter of the total time at 4096 rows. This module gets FP32 sums from oneDNN and applies the token scales itself. This
gives the same bits in less time. On CPUs with AMX, vLLM runs W8A8 with `int8_scaled_mm_with_quant` instead, which
rounds differently.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.base import LinearKernel, PreparedWeight
from qarl.kernels.cpu.torch_linears import int8_linear, int8_unavailable, int_mm
from qarl.kernels.int4 import TILES, VALUES_PER_INT32, to_tiles
from qarl.kernels.reference import quantize_int8_cuda
from qarl.process import allow_matrix_tiles, configure_vllm_process, vllm_missing

_TILE_CHANNELS = 32  # int8_scaled_mm_with_quant reads 32 output channels at a time


class PreparedInt8Tiles(NamedTuple):
    """`weight` in the operator's blocks, padded with rows of zeros to a multiple of 32; `scale` FP32 [rows, 1]."""

    weight: torch.Tensor
    scale: torch.Tensor
    out_features: int


class PreparedInt8(NamedTuple):
    """`handler` contains the packed weight. It reads `scale` by a raw pointer, so `scale` must outlive it."""

    handler: Any
    scale: torch.Tensor


@cache
def cpu_ops_missing(operator: str) -> str | None:
    if missing := vllm_missing():
        return missing
    if "vllm" in sys.modules:  # this may be a vLLM worker, whose environment variables the user set
        allow_matrix_tiles()
    else:
        configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C
    from vllm.platforms import current_platform

    if not hasattr(torch.ops._C, operator):
        return f"this vLLM build has no {operator}: either the CPU lacks AVX512, or the build is not for CPUs"
    if current_platform.is_zen_cpu():
        return "vLLM prefers zentorch's kernels on this machine"
    return None


def _quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `qarl.kernels.reference.quantize_int8` in one pass."""
    values = torch.empty(x.shape, dtype=torch.int8)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32)
    torch.ops._C.dynamic_scaled_int8_quant(values, x.contiguous(), scale, None)
    return values, scale


class VllmCpuWNA16Linear(LinearKernel):
    """W4A16 by `cpu_gemm_wna16`, the operator of vLLM's CPUWNA16LinearKernel."""

    name = "vllm_cpu_wna16"
    layout = TILES

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        if shape[0] % 32 or shape[1] % 32:
            return f"needs N and K in multiples of 32, not {list(shape)}"
        return cpu_ops_missing("cpu_gemm_wna16")

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Convert to int32 [N/16, 2K] and BF16 [K/g, N], like vLLM's `process_weights_after_loading`.

        The codes may already be in tiles, as `weight_tiles`.
        """
        weight = tensors["weight_tiles"] if "weight_tiles" in tensors else to_tiles(tensors["weight_packed"])
        return PreparedWeight(weight, tensors["weight_scale"].t().contiguous())

    @staticmethod
    def prepare_stack(tensors: Mapping[str, torch.Tensor]) -> list[PreparedWeight]:
        """Prepare all matrices of a stack [E, N, ...] at once. Each result is a view. Except for tiles, its memory is
        new, because a transport may reuse that of `tensors`."""
        tiles = tensors.get("weight_tiles")
        scales = tensors["weight_scale"].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        if tiles is None:
            tiles = to_tiles(tensors["weight_packed"].flatten(0, 1)).unflatten(0, (len(scales), -1))
        return [PreparedWeight(*both) for both in zip(tiles.unbind(), scales.unbind(), strict=True)]

    @staticmethod
    def linear(x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, K] BF16, any strides -> [M, N] BF16."""
        if x.stride(1) != 1:  # the operator reads rows at their stride but assumes adjacent elements
            x = x.contiguous()
        output = x.new_empty(x.shape[0], prepared.scale.shape[1])
        torch.ops._C.cpu_gemm_wna16(
            x, prepared.weight, output, prepared.scale, None, None, bias, VALUES_PER_INT32, isa_hint()
        )
        return output


class VllmCpuInt8Linear(LinearKernel):
    """W8A8 by a oneDNN product, with the bits of vLLM's CPUInt8ScaledMMLinearKernel."""

    name = "vllm_cpu_int8"
    quantize_input = staticmethod(_quantize_int8)

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        if _int8_tiles_serve(shape):
            return "on CPUs with AMX vLLM runs int8_scaled_mm_with_quant"
        return int8_unavailable(device) or cpu_ops_missing("create_onednn_scaled_mm_handler")

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedInt8:
        from vllm import _custom_ops as ops

        scale = tensors["weight_scale"].clone()
        handler = ops.create_onednn_scaled_mm(
            tensors["weight"].t(), scale, torch.float32, dynamic_quant=False, use_azp=False, primitive_cache_size=32
        )
        return PreparedInt8(handler, scale)

    @staticmethod
    def prepare_gathered(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Return views of the tensors, for a product with `torch._int_mm`.

        The bits are the same as with `prepare`. Packing a oneDNN weight would take longer than a product with 512 rows.
        """
        return PreparedWeight(tensors["weight"].t(), tensors["weight_scale"].t())

    @staticmethod
    def linear(x: torch.Tensor, prepared: PreparedInt8 | PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(prepared, PreparedWeight):
            return int8_linear(int_mm(prepared), _quantize_int8(x), prepared.weight.shape[1], bias)
        # The dtype is explicit, because vLLM loads models under a different default dtype.
        unit_scale = torch.ones(1, dtype=torch.float32)

        def multiply(rows: torch.Tensor, out: torch.Tensor) -> None:
            torch.ops._C.onednn_scaled_mm(out, rows, unit_scale, None, None, None, prepared.handler.handler_tensor)

        return int8_linear(multiply, _quantize_int8(x), prepared.handler.n, bias)


class VllmCpuInt8TilesLinear(LinearKernel):
    """W8A8 by `int8_scaled_mm_with_quant`, the operator of vLLM's CPUInt8ScaledMMLinearKernel on CPUs with AMX."""

    name = "vllm_cpu_int8_tiles"
    quantize_input = staticmethod(quantize_int8_cuda)  # about 1 in 3,000 is rounded differently in the operator

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        if not _int8_tiles_serve(shape):
            return "vLLM runs it only on CPUs with AMX, if N is a multiple of 16 and K of 32"
        return cpu_ops_missing("int8_scaled_mm_with_quant")

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedInt8Tiles:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        # The operator takes blocks of 32 channels. vLLM fuses layers to fill them; here a single layer is padded.
        padding = (0, 0, 0, -len(weight) % _TILE_CHANNELS)
        packed = torch.ops._C.convert_weight_packed(F.pad(weight, padding))
        return PreparedInt8Tiles(packed, F.pad(scale, padding), len(weight))

    @staticmethod
    def linear(x: torch.Tensor, prepared: PreparedInt8Tiles, bias: torch.Tensor | None) -> torch.Tensor:
        weight, scale, out_features = prepared
        if bias is not None:
            bias = F.pad(bias.float(), (0, len(scale) - out_features))
        if x.stride(1) != 1:
            x = x.contiguous()
        y: torch.Tensor = torch.ops._C.int8_scaled_mm_with_quant(x, weight, scale, bias, x.dtype, True)
        return y if len(scale) == out_features else y[:, :out_features].contiguous()


def _int8_tiles_serve(shape: tuple[int, int]) -> bool:
    """Return whether vLLM uses AMX for int8 weights [N, K]. Importing vLLM's `check_cpu_sgl_kernel` would be slow."""
    return torch.cpu._is_amx_tile_supported() and shape[0] % 16 == 0 and shape[1] % 32 == 0


def isa_hint() -> str:
    """Return the instructions ("amx" or "vec") that vLLM uses on x86 for W4A16 linears and for BF16 experts."""
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"
