"""`QuantizedTensor`: one weight in low bits, held as the very tensors that go over the wire and to disk.

The trainer's GEMM, the publisher and the checkpoint writer all read this object, so "the engine runs what the trainer
trained with" is a comparison of bytes: `equals` and `digest`. Made by `qarl.quant.quantize.quantize`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.kernels.int4 import dequantize_int4
from qarl.quant.scheme import Scheme


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A [N, K] weight under `scheme`.

    `tensors` maps compressed-tensors' parameter names to the wire tensors. For `w4a16` and `w4a8`: `weight_packed`
    int32 [N, K/8], `weight_scale` [N, K/group_size] in the dtype of the weight it was made from (BF16 on the wire), and
    `weight_shape` int64 [2], which is on the CPU wherever the others are. For `w8a8` and `fp8`: `weight` int8 or
    float8_e4m3fn [N, K] and `weight_scale` FP32 [N, 1].
    """

    scheme: Scheme
    shape: tuple[int, int]
    tensors: dict[str, Tensor]

    def named(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and tensors of the layer called `prefix`: (`<prefix>.weight_packed`, tensor), and so on."""
        for name, tensor in self.tensors.items():
            yield f"{prefix}.{name}", tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, the 16 of `weight_shape` included."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digest(self) -> str:
        """SHA-256 in hex over names, dtypes, shapes and bytes; the same on every device."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            sha.update(_bytes(tensor).cpu().numpy().data)
        return sha.hexdigest()

    def equals(self, other: QuantizedTensor) -> bool:
        """Whether names, dtypes, shapes and bytes are equal, on any devices. 0.0 and -0.0 are different."""
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
        """The [N, K] weight that the low-bit GEMM multiplies by, as `dtype`; also Ŵ of the straight-through backward.

        It is compressed-tensors' `dequantize` of the same tensors: the product of code and scale, rounded to the
        scale's dtype, and then cast to `dtype`. Made from a BF16 weight and taken as BF16, that is one rounding,
        `bf16(float(code) * float(scale))`, for every scheme: for int4 the operand of vLLM's CPU kernel; for 8 bits the
        product of so few bits is exact in FP32 (the GEMM itself multiplies the codes and applies the scale later).
        """
        if "weight_packed" in self.tensors:
            return dequantize_int4(self.tensors["weight_packed"], self.tensors["weight_scale"], dtype)
        return self.tensors["weight"].float().mul_(self.tensors["weight_scale"]).to(dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
