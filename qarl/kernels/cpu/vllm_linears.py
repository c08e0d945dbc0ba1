"""The rollout engine's CPU operators, for the trainer. The same operands give the engine's bits.

vLLM registers them as `torch.ops._C.*`. They have no autograd. `qarl.quant.linear` adds it. A row's result does not
depend on other rows.

W4A16 is `cpu_gemm_wna16`. Each weight becomes `bf16(float(q - 8) * float(scale))`. Products are summed in FP32 in the
order of K, and rounded once. So fusing layers along N does not change a result. K and N must be multiples of 32, and
the group size even.

W8A8 is a oneDNN product. vLLM's code around it (csrc/cpu/dnnl_kernels.cpp) applies the token scales, which takes a
quarter of the total time at 4096 rows. This module gets sums from oneDNN and applies the token scales itself. This
gives the same bits in less time. A weight is packed for oneDNN only if it is multiplied often (`PreparedInt8`). On CPUs
with AMX, vLLM runs W8A8 with `int8_scaled_mm_with_quant` instead, which rounds differently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.base import (
    Layout,
    LinearKernel,
    PreparedWeight,
    Tensors,
    eight_bit_bytes,
    int4_bytes,
)
from qarl.kernels.cpu.torch_linears import int8_linear, int8_unavailable, int_mm
from qarl.kernels.reference import quantize_int8_cuda
from qarl.process import allow_matrix_tiles, configure_vllm_process, vllm_missing
from qarl.schemes.base import INT4_BF16, INT8_INT8, Scheme

TILE_ROWS = 16
_VALUES_PER_INT32 = 8
_TILE_CHANNELS = 32  # int8_scaled_mm_with_quant reads 32 output channels at a time


class PreparedInt8Tiles(NamedTuple):
    """`weight` in the operator's blocks, padded with rows of zeros to a multiple of 32; `scale` FP32 [rows, 1]."""

    weight: torch.Tensor
    scale: torch.Tensor
    out_features: int


_ROWS_WORTH_PACKING = 4096
"""Rows by which a weight is multiplied before it is packed for oneDNN."""


class PreparedInt8:
    """An int8 weight that is packed for oneDNN when enough rows have been multiplied by it.

    vLLM's handler packs with oneDNN's reference code, which takes 2.5 ns for each weight, as long as a product with a
    thousand rows. Without a handler, oneDNN's product reads the weight as it is, and takes 3% to 20% longer. Both sum
    integers and round alike, so they have the same bits. Most updates have few micro-batches, after which there is
    another weight.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """`weight`: int8 [N, K]; it must not change. `scale`: FP32 [N, 1]."""
        self._weight = weight
        self._scale = scale.clone()  # the handler reads it by a raw pointer
        self._rows = 0
        self._handler: Any = None

    @property
    def out_features(self) -> int:
        return len(self._scale)

    @property
    def packed(self) -> bool:
        return self._handler is not None

    def product_of(self, rows: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return the function of `int8_linear` for the next `rows` rows."""
        self._rows += rows
        if not self.packed and self._rows > _ROWS_WORTH_PACKING:
            self.pack()
        if not self.packed:
            return int_mm(PreparedWeight(self._weight.t(), self._scale.t()))
        # The dtype is explicit, because vLLM loads models under a different default dtype.
        unit_scale = torch.ones(1, dtype=torch.float32)

        def multiply(values: torch.Tensor, out: torch.Tensor) -> None:
            torch.ops._C.onednn_scaled_mm(
                out, values, unit_scale, None, None, None, self._handler.handler_tensor
            )

        return multiply

    def pack(self) -> None:
        """Copy the weight into oneDNN's layout."""
        from vllm import _custom_ops as ops

        self._handler = ops.create_onednn_scaled_mm(
            self._weight.t(),
            self._scale,
            torch.float32,
            dynamic_quant=False,
            use_azp=False,
            primitive_cache_size=32,
        )
        self._weight = self._weight.new_empty(0)


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


def to_tiles(packed: torch.Tensor) -> torch.Tensor:
    """Convert `weight_packed`, int32 [..., N, K/8], to tiles, int32 [..., N/16, 2K]. N must be a multiple of 16."""
    pairs = packed.contiguous().view(torch.uint8)
    half = pairs.shape[-1]  # a byte holds two values of one output channel, adjacent along K
    even, odd = pairs.view(-1, TILE_ROWS // 2, 2, half).unbind(2)
    tiles = pairs.new_empty(len(even), half, 2, TILE_ROWS // 2)
    tiles[:, :, 0] = ((even & 0xF) | (odd << 4)).transpose(1, 2)
    tiles[:, :, 1] = ((even >> 4) | (odd & 0xF0)).transpose(1, 2)
    return tiles.view(-1).view(torch.int32).view(*packed.shape[:-2], -1, 4 * half)


def from_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """Invert `to_tiles`: int32 [..., N/16, 2K] -> int32 [..., N, K/8]."""
    half = tiles.shape[-1] // 4
    low, high = tiles.contiguous().view(torch.uint8).view(-1, half, 2, TILE_ROWS // 2).unbind(2)
    pairs = low.new_empty(len(low), TILE_ROWS // 2, 2, half)
    pairs[:, :, 0] = ((low & 0xF) | (high << 4)).transpose(1, 2)
    pairs[:, :, 1] = ((low >> 4) | (high & 0xF0)).transpose(1, 2)
    return pairs.view(*tiles.shape[:-2], -1, half).view(torch.int32)


def _convert(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {
        "weight_tiles": to_tiles(tensors["weight_packed"]),
        "weight_scale": tensors["weight_scale"],
    }


def _restore(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": from_tiles(tensors["weight_tiles"]),
        "weight_scale": tensors["weight_scale"],
    }


TILES = Layout("weight_tiles", lambda shape: shape[-2] % TILE_ROWS == 0, _convert, _restore)
"""In a tile of 16 channels, the 16 codes for one k are adjacent: byte 8 k + c contains channels 2 c and 2 c + 1
(csrc/cpu/cpu_wna16.cpp). Scales are as on the wire."""


class VllmCpuWNA16Linear(LinearKernel):
    """W4A16 by `cpu_gemm_wna16`, the operator of vLLM's CPUWNA16LinearKernel."""

    operands = INT4_BF16
    multiplies_experts = True
    name = "vllm_cpu_wna16"
    layout = TILES

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        if shape[0] % 32 or shape[1] % 32:
            return f"needs N and K in multiples of 32, not {list(shape)}"
        return cpu_ops_missing("cpu_gemm_wna16")

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return int4_bytes(scheme, shape)

    @staticmethod
    def prepare(tensors: Tensors) -> PreparedWeight:
        """Convert to int32 [N/16, 2K] and BF16 [K/g, N], like vLLM's `process_weights_after_loading`.

        The codes may already be in tiles, as `weight_tiles`.
        """
        weight = (
            tensors["weight_tiles"]
            if "weight_tiles" in tensors
            else to_tiles(tensors["weight_packed"])
        )
        return PreparedWeight(weight, tensors["weight_scale"].t().contiguous())

    @staticmethod
    def in_layout(prepared: PreparedWeight) -> Tensors:
        return {TILES.codes: prepared.weight, "weight_scale": prepared.scale.t()}

    @staticmethod
    def prepare_stack(tensors: Tensors) -> list[PreparedWeight]:
        """Prepare all matrices of a stack [E, N, ...] at once. Each result is a view. Except for tiles, its memory is
        new, because a transport may reuse that of `tensors`."""
        tiles = tensors.get("weight_tiles")
        scales = (
            tensors["weight_scale"].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        )
        if tiles is None:
            tiles = to_tiles(tensors["weight_packed"])
        return [PreparedWeight(*both) for both in zip(tiles.unbind(), scales.unbind(), strict=True)]

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [M, K] BF16, any strides -> [M, N] BF16."""
        if (
            x.stride(1) != 1
        ):  # the operator reads rows at their stride but assumes adjacent elements
            x = x.contiguous()
        output = x.new_empty(x.shape[0], prepared.scale.shape[1])
        torch.ops._C.cpu_gemm_wna16(
            x,
            prepared.weight,
            output,
            prepared.scale,
            None,
            None,
            bias,
            _VALUES_PER_INT32,
            isa_hint(),
        )
        return output


def stack_of(prepared: Sequence[PreparedWeight]) -> dict[str, torch.Tensor]:
    """Return the stack in tiles that `prepare_stack` has prepared, as views of the same memory."""

    def whole(first: torch.Tensor) -> torch.Tensor:
        return first.as_strided((len(prepared), *first.shape), (first.numel(), *first.stride()))

    first = prepared[0]
    return {TILES.codes: whole(first.weight), "weight_scale": whole(first.scale).transpose(1, 2)}


class VllmCpuInt8Linear(LinearKernel):
    """W8A8 by a oneDNN product, with the bits of vLLM's CPUInt8ScaledMMLinearKernel."""

    operands = INT8_INT8
    multiplies_experts = True
    name = "vllm_cpu_int8"
    quantize_input = staticmethod(_quantize_int8)

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        if _int8_tiles_serve(shape):
            return "on CPUs with AMX vLLM runs int8_scaled_mm_with_quant"
        return int8_unavailable(device) or cpu_ops_missing("create_onednn_scaled_mm_handler")

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return eight_bit_bytes(shape)

    @staticmethod
    def prepare(tensors: Tensors) -> PreparedInt8:
        return PreparedInt8(tensors["weight"], tensors["weight_scale"])

    @staticmethod
    def prepare_stack(tensors: Tensors) -> list[PreparedInt8]:
        """Pack all matrices of a stack [E, N, K] at once, because a transport may reuse the memory of `tensors`."""
        stack = [
            PreparedInt8(*both)
            for both in zip(tensors["weight"], tensors["weight_scale"], strict=True)
        ]
        for prepared in stack:
            prepared.pack()
        return stack

    @staticmethod
    def prepare_gathered(tensors: Tensors) -> PreparedWeight:
        """Return views of the tensors, for products with a weight that is never packed."""
        return PreparedWeight(tensors["weight"].t(), tensors["weight_scale"].t())

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedInt8 | PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(prepared, PreparedWeight):
            return int8_linear(int_mm(prepared), _quantize_int8(x), prepared.weight.shape[1], bias)
        multiply = prepared.product_of(len(x))
        return int8_linear(multiply, _quantize_int8(x), prepared.out_features, bias)


class VllmCpuInt8TilesLinear(LinearKernel):
    """W8A8 by `int8_scaled_mm_with_quant`, the operator of vLLM's CPUInt8ScaledMMLinearKernel on CPUs with AMX."""

    operands = INT8_INT8
    multiplies_experts = True
    name = "vllm_cpu_int8_tiles"
    quantize_input = staticmethod(
        quantize_int8_cuda
    )  # about 1 in 3,000 is rounded differently in the operator

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        if not _int8_tiles_serve(shape):
            return "vLLM runs it only on CPUs with AMX, if N is a multiple of 16 and K of 32"
        return cpu_ops_missing("int8_scaled_mm_with_quant")

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return eight_bit_bytes(shape)

    @staticmethod
    def prepare(tensors: Tensors) -> PreparedInt8Tiles:
        weight = tensors["weight"]
        scale = tensors["weight_scale"]
        # The operator takes blocks of 32 channels. vLLM fuses layers to fill them; here a single layer is padded.
        padding = (0, 0, 0, -len(weight) % _TILE_CHANNELS)
        packed = torch.ops._C.convert_weight_packed(F.pad(weight, padding))
        return PreparedInt8Tiles(packed, F.pad(scale, padding), len(weight))

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedInt8Tiles, bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight, scale, out_features = prepared
        if bias is not None:
            bias = F.pad(bias.float(), (0, len(scale) - out_features))
        if x.stride(1) != 1:
            x = x.contiguous()
        y: torch.Tensor = torch.ops._C.int8_scaled_mm_with_quant(
            x, weight, scale, bias, x.dtype, True
        )
        return y if len(scale) == out_features else y[:, :out_features].contiguous()


def _int8_tiles_serve(shape: tuple[int, int]) -> bool:
    """Return whether vLLM uses AMX for int8 weights [N, K]. Importing vLLM's `check_cpu_sgl_kernel` would be slow."""
    return torch.cpu._is_amx_tile_supported() and shape[0] % 16 == 0 and shape[1] % 32 == 0


def isa_hint() -> str:
    """Return the instructions ("amx" or "vec") that vLLM uses on x86 for W4A16 linears and for BF16 experts."""
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"
