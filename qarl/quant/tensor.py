"""`QuantizedTensor`: one weight in low bits, stored as the same tensors that are sent to the engine and written to
disk.

The trainer's GEMM, the publisher and the checkpoint writer all read this object, which `qarl.quant.quantize.quantize`
returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.kernels.int4 import dequantize_int4
from qarl.quant.scheme import Scheme


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

    def named(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield checkpoint names, such as `<prefix>.weight_packed`, and tensors for the layer called `prefix`."""
        for name, tensor in self.tensors.items():
            yield f"{prefix}.{name}", tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, including the 16 bytes of `weight_shape`."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def equals(self, other: QuantizedTensor) -> bool:
        """Return whether names, dtypes, shapes and bytes are equal. Devices may differ. 0.0 and -0.0 are not equal."""
        if self.tensors.keys() != other.tensors.keys():
            return False
        for name, mine in self.tensors.items():
            theirs = other.tensors[name]
            if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
                return False
            if not torch.equal(_bytes(mine), _bytes(theirs.to(mine.device))):
                return False
        return True

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight [N, K] that the low-bit GEMM multiplies by, as `dtype`. The backward uses it as Ŵ.

        It equals compressed-tensors' `dequantize`: the product of code and scale, rounded to the scale's dtype, then
        cast to `dtype`. For a BF16 weight and BF16 output every scheme rounds once: `bf16(float(code) * float(scale))`.
        For int4 this is the operand of vLLM's CPU kernel. 8-bit GEMMs multiply the codes themselves and apply the scale
        to the sum.
        """
        if "weight_packed" in self.tensors:
            return dequantize_int4(self.tensors["weight_packed"], self.tensors["weight_scale"], dtype)
        return self.tensors["weight"].float().mul_(self.tensors["weight_scale"]).to(dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
