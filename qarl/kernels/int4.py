"""int4 weights: the wire format, and the layouts in which vLLM's kernels read the same codes. Marlin's is made here.

    wire     `weight_packed` int32 [N, K/8] and `weight_scale` [N, K/g]: eight codes in an int32, lowest nibble first,
             stored with offset +8
    tiles    vLLM's CPU kernel (`qarl.kernels.cpu.vllm_linears`)
    Marlin   vLLM's Marlin kernel for experts, for a whole stack [E, N, K]

All layouts have the same codes in a different order. If a weight is split along its first dimension into parts that
fit, the layouts of the parts, one after another, are that of the weight. So a rank can make the layout of its own shard
once per optimizer step (`qarl.quant.weight_shard`), and FSDP2 gathers what a kernel reads. A kernel names its layout in
the attribute `layout`, and its `prepare` takes wire tensors or tensors in this layout. The backward and the publish
restore the wire tensors.

vLLM repacks one expert after another for Marlin (`gptq_marlin_moe_repack`, `marlin_moe_permute_scales`), and waits for
the device each time. Here a whole stack is a few operations, on any device. The bytes are those of vLLM's plain
PyTorch, `marlin_weights` and `marlin_permute_scales` (marlin_utils_test.py, marlin_utils.py). The way back is in every
backward, so on GPUs it is one kernel.

In the wire format, byte q of int32 number 2 t + h of row n has the codes of columns 16 t + 8 h + 2 q (low nibble) and
the next one. In Marlin's layout, for row n = 64 j + 16 i + 8 b + c, they lie in int32 number 128 j + 16 c + 4 q + i of
tile t: the code of column 2 q + o in byte 2 o + b, for h = 0 in the low nibble, for h = 1 in the high one. The scales
of 64 rows are transposed as an 8 x 8 matrix. If a row has a single scale, those of 32 rows are permuted as [4, 4, 2] ->
[4, 4, 2] with the first two dimensions exchanged.
"""

from __future__ import annotations

import torch

from qarl.kernels.base import Layout, Tensors
from qarl.kernels.triton.linears import unavailable
from qarl.schemes.base import INT4_BF16


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int32 [N, K/8] -> int8 [N, K] in -8..7."""
    pairs = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((pairs & 0xF, pairs >> 4), dim=-1)
    return nibbles.view(torch.int8).sub_(8).view(packed.shape[0], -1)


def dequantize_int4(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return [N, K] in `dtype`: value times scale, rounded to the scale's dtype, then cast.

    This equals compressed-tensors' `dequantize`. For BF16 scales it also equals the operand of vLLM's CPU kernel,
    `bf16(float(q - 8) * float(scale))`.
    """
    codes = unpack_int4(packed)
    values = codes.to(scale.dtype).view(*scale.shape, -1).mul_(scale.unsqueeze(-1))
    return values.view(codes.shape).to(dtype)


CODES, SCALES = "marlin_codes", "marlin_scales"
"""Names of the tensors in Marlin's layout."""
_ROWS, _COLUMNS = 64, 16
"""Rows and columns of a weight must be multiples of these."""


def _fits_marlin(shape: tuple[int, ...]) -> bool:
    """Return whether a stack of `shape` [E, N, K] has a Marlin layout."""
    return len(shape) == 3 and shape[1] % _ROWS == 0 and shape[2] % _COLUMNS == 0


def to_marlin(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Convert stacked wire tensors.

    From `weight_packed` int32 [E, N, K/8] and `weight_scale` BF16 [E, N, K/g], make `marlin_codes` int32 [E, K/16, 2N]
    and `marlin_scales` BF16 [E, K/g, N]. N is a multiple of 64 and K of 16.
    """
    packed = tensors["weight_packed"]
    scale = tensors["weight_scale"]
    return {CODES: _codes_to_marlin(packed), SCALES: _scales_to_marlin(scale)}


def from_marlin(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Invert `to_marlin`."""
    codes = tensors[CODES]
    scales = tensors[SCALES]
    return {"weight_packed": _codes_from_marlin(codes), "weight_scale": _scales_from_marlin(scales)}


def _codes_to_marlin(packed: torch.Tensor) -> torch.Tensor:
    experts, rows, words = packed.shape
    sizes = (experts, rows // 64, 4, 2, 8, words // 2, 2, 4)  # E j i b c t h q
    pairs = packed.contiguous().view(torch.uint8).view(sizes)
    low, high = pairs.permute(6, 0, 5, 1, 4, 7, 2, 3).unbind()  # E t j c q i b
    codes = pairs.new_empty(*low.shape[:-1], 2, 2)  # E t j c q i o b
    codes[..., 0, :] = (low & 0xF) | (high << 4)
    codes[..., 1, :] = (low >> 4) | (high & 0xF0)
    return codes.view(-1).view(torch.int32).view(experts, words // 2, 2 * rows)


def _codes_from_marlin(codes: torch.Tensor) -> torch.Tensor:
    if unavailable(INT4_BF16, codes.device) is None:
        from qarl.kernels.triton.quantize import codes_from_marlin

        return codes_from_marlin(codes)
    experts, tiles, words = codes.shape
    sizes = (experts, tiles, words // 128, 8, 4, 4, 2, 2)  # E t j c q i o b
    pairs = codes.contiguous().view(torch.uint8).view(sizes)
    even, odd = pairs.permute(6, 0, 2, 5, 7, 3, 1, 4).unbind()  # E j i b c t q
    packed = pairs.new_empty(*even.shape[:-1], 2, 4)  # E j i b c t h q
    packed[..., 0, :] = (even & 0xF) | (odd << 4)
    packed[..., 1, :] = (even >> 4) | (odd & 0xF0)
    return packed.view(-1).view(torch.int32).view(experts, words // 2, 2 * tiles)


def _scales_to_marlin(scale: torch.Tensor) -> torch.Tensor:
    experts, rows, groups = scale.shape
    return _permuted(scale.mT).reshape(experts, groups, rows)


def _scales_from_marlin(scales: torch.Tensor) -> torch.Tensor:
    return _permuted(scales).reshape(scales.shape).mT.contiguous()


def _permuted(scales: torch.Tensor) -> torch.Tensor:
    """Permute the rows of `scales` [E, K/g, N], here split into several dimensions. A second call restores them."""
    if scales.shape[1] > 1:
        return scales.unflatten(2, (-1, 8, 8)).mT
    return scales.unflatten(2, (-1, 4, 4, 2)).transpose(3, 4)


MARLIN = Layout(CODES, _fits_marlin, to_marlin, from_marlin)
