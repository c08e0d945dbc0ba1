"""The Triton kernels as `LinearKernel`s of qarl.kernels.registry. They compute dX, so no BF16 copy of a weight is kept.

Triton is imported only on a machine with a GPU, or with TRITON_INTERPRET=1. The interpreter runs the kernels on the
CPU, for tests.

To compute dX, 8-bit weights are dequantized to a transient BF16 buffer (3 bytes of traffic per weight), and cuBLAS
multiplies. The gradients are BF16, so a compute-bound product would gain nothing from 8-bit weights.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import ClassVar

import torch

from qarl.kernels.base import LinearKernel, PreparedWeight, capability, has_gpu, is_gpu
from qarl.kernels.int4_planes import to_pairs, to_planes
from qarl.kernels.speed import on_hopper
from qarl.schemes.base import FP8_FP8, INT4_BF16, INT8_INT8, Operands, Scheme
from qarl.schemes.kernel_choice import KernelChoice

LEAST_CAPABILITY = (8, 0)
"""The lowest CUDA capability whose tensor cores have the instructions that Triton 3.6 emits."""
LEAST_CAPABILITY_FP8 = (9, 0)
"""The same for products of 8-bit floats."""


def unavailable(operands: Operands, device: torch.device) -> str | None:
    """Return why Triton does not multiply `operands` on `device`, or None if it does."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not is_gpu(device):
        return f"runs on GPUs, not on {device.type}"
    if not has_gpu():
        return "there is no GPU in this machine"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    floats = operands == FP8_FP8
    if torch.version.hip is not None:
        return "AMD GPUs use different FP8 types" if floats else None
    needed = LEAST_CAPABILITY_FP8 if floats else LEAST_CAPABILITY
    if capability(device) < needed:
        return f"needs compute capability {needed[0]}.{needed[1]}"
    return None


class _TritonLinear(LinearKernel):
    name = "triton"
    computes_input_gradient = True
    rounds_like_cuda = True

    @classmethod
    def unavailable(cls, device: torch.device, shape: tuple[int, int]) -> str | None:
        return unavailable(cls.operands, device)


class TritonW4A16Linear(_TritonLinear):
    """int4 weights, dequantized in registers, or with many rows in a transient buffer (w4a16_forward.py)."""

    operands = INT4_BF16
    group_sizes = tuple(2**exponent for exponent in range(5, 13))
    batch_invariant = False
    speed = on_hopper("bf16", "triton", 0.501, 0.764, 0.703)  # with codes in the order of the wire

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        rows, columns = shape
        assert scheme.group_size is not None
        return rows * columns // 2 + 4 * rows * (columns // scheme.group_size)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Return the codes in planes, int32 [N, K/8], and each scale twice, int32 [N, K/g]
        (`qarl.kernels.int4_planes`)."""
        convert = to_planes
        if unavailable(INT4_BF16, tensors["weight_packed"].device) is None:
            from qarl.kernels.triton.planes import to_planes as convert
        return PreparedWeight(convert(tensors["weight_packed"]), to_pairs(tensors["weight_scale"]))

    @classmethod
    def linear(
        cls, x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        from qarl.kernels.triton.w4a16_forward import w4a16_linear

        return w4a16_linear(x, *prepared, bias, batch_invariant=cls.batch_invariant)

    @classmethod
    def backward_input(
        cls, grad: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        from qarl.kernels.triton.w4a16 import w4a16_backward_input

        return w4a16_backward_input(grad, tensors["weight_packed"], tensors["weight_scale"])


class TritonW8A8Linear(_TritonLinear):
    """int8 weights and activations. Our kernel quantizes the activations (quantize.py, scaled_mm.py).

    Sums of int8 products are exact, so a row has the same bits with any tile, and quant.kernels=qarl chooses this class
    too.
    """

    operands = INT8_INT8
    options: ClassVar[tuple[KernelChoice, ...]] = (KernelChoice.ENGINE, KernelChoice.QARL)
    dtype = torch.int8
    batch_invariant = False
    row_invariant = True
    speed = on_hopper("int8", "triton", 0.203, 0.495, 0.488)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Return the wire tensors themselves."""
        return PreparedWeight(tensors["weight"], tensors["weight_scale"])

    @classmethod
    def linear(
        cls, x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [M, K] BF16 -> [M, N] BF16. FP8 uses `fast_accumulation`, like the rollout engine."""
        from qarl.kernels.triton.quantize import quantize_tokens
        from qarl.kernels.triton.scaled_mm import scaled_mm

        values, scale = quantize_tokens(x, cls.dtype)
        return scaled_mm(
            values,
            scale,
            *prepared,
            bias,
            fast_accumulation=True,
            batch_invariant=cls.batch_invariant,
        )

    @staticmethod
    def backward_input(grad: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from qarl.kernels.triton.quantize import dequantize_rows

        return grad @ dequantize_rows(tensors["weight"], tensors["weight_scale"])

    @classmethod
    def dequantized_input(cls, x: torch.Tensor) -> torch.Tensor:
        from qarl.kernels.triton.quantize import dequantize_rows, quantize_tokens

        return dequantize_rows(*quantize_tokens(x, cls.dtype))


class TritonFP8Linear(TritonW8A8Linear):
    """Like TritonW8A8Linear, with float8_e4m3fn weights and activations."""

    operands = FP8_FP8
    options: ClassVar[tuple[KernelChoice, ...]] = (KernelChoice.ENGINE,)
    dtype = torch.float8_e4m3fn
    row_invariant = False
    speed = on_hopper("fp8", "triton", 0.321, 0.623, 0.606)


class TritonInvariantW4A16Linear(TritonW4A16Linear):
    """The forward has one order of summation for any number of rows. Chosen by quant.kernels=qarl.

    dX takes the path of `TritonW4A16Linear`: the engine computes no dX, so there is nothing that it must be equal to.
    """

    name = "triton_batch_invariant"
    options = (KernelChoice.ENGINE, KernelChoice.QARL)
    batch_invariant = True
    row_invariant = True
    speed = on_hopper(
        "bf16", "triton_batch_invariant", 0.360, 0.395, 0.355
    )  # with its tile of 64 rows


class TritonInvariantFP8Linear(TritonFP8Linear):
    """Like TritonInvariantW4A16Linear, for FP8."""

    name = "triton_batch_invariant"
    options = (KernelChoice.ENGINE, KernelChoice.QARL)
    batch_invariant = True
    row_invariant = True
    speed = on_hopper("fp8", "triton_batch_invariant", 0.425, 0.574, 0.575)
