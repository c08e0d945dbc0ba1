"""Convert int4 codes from Marlin's layout (`qarl.kernels.cuda.marlin`) to the wire format, in one pass over memory.

vLLM has no such kernel, because it does not train. In PyTorch it would be nine passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.device import launch
from qarl.kernels.triton._compat import LAUNCH, require, require_device

_TILES = 16


@triton.jit
def codes_from_marlin_kernel(codes_ptr, packed_ptr, tiles, row_blocks, TILES: tl.constexpr):
    """A program converts 64 rows of `TILES` tiles of 16 columns. Bytes per code: 1, at 4.3e12 B/s on H200."""
    block = tl.program_id(0).to(tl.int64)  # of all experts
    expert, block_of_expert = block // row_blocks, block % row_blocks
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, 32)
    inside = tile[None, :] < tiles
    source = codes_ptr + expert * tiles * row_blocks * 128 + block_of_expert * 128
    offset = (lane // 4 * 16 + lane % 4)[:, None] + tile[None, :].to(tl.int64) * row_blocks * 128
    first_row = block * 64 + lane % 4 * 16 + lane // 4
    for b in tl.static_range(2):
        low = tl.zeros([32, TILES], tl.int32)
        high = tl.zeros([32, TILES], tl.int32)
        for q in tl.static_range(4):
            word = tl.load(source + offset + 4 * q, mask=inside, other=0)
            for o in tl.static_range(2):
                pair = word >> (16 * o + 8 * b)
                low |= (pair & 0xF) << (8 * q + 4 * o)
                high |= ((pair >> 4) & 0xF) << (8 * q + 4 * o)
        words = tl.reshape(tl.join(low, high), (32, 2 * TILES))
        column = tl.program_id(1) * 2 * TILES + tl.arange(0, 2 * TILES)
        target = packed_ptr + (first_row + 8 * b)[:, None] * (2 * tiles) + column[None, :]
        tl.store(target, words, mask=column[None, :] < 2 * tiles)


def codes_from_marlin(codes: torch.Tensor) -> torch.Tensor:
    """int32 [E, K/16, 2N] in Marlin's layout -> int32 [E, N, K/8] in the wire format.

    Raise ValueError for a different dtype, or unless N is a multiple of 64.
    """
    experts, tiles, words = codes.shape
    require(codes.dtype == torch.int32 and words % 128 == 0, f"codes must be int32 [E, K/16, 128 j], not {codes.dtype}")
    require_device(codes)
    packed = codes.new_empty(experts, words // 2, 2 * tiles)
    if packed.numel():
        row_blocks = words // 128
        launch(
            codes_from_marlin_kernel, (experts * row_blocks, triton.cdiv(tiles, _TILES)),
            codes.contiguous(), packed, tiles, row_blocks, TILES=_TILES, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return packed
