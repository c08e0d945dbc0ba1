"""Convert int4 weights between the wire format and the tiles of vLLM's CPU kernel.

In the wire format, `weight_packed` int32 [N, K/8], the codes of one output channel are adjacent. In a tile of 16
channels, the 16 codes for one k are adjacent: byte 8 k + c contains channels 2 c and 2 c + 1 (csrc/cpu/cpu_wna16.cpp).

Both layouts have the same bytes in a different order. If a weight is split into parts of whole tiles, the tiles of the
parts, one after another, are the tiles of the weight.
"""

from __future__ import annotations

import torch

from qarl.kernels.int4 import VALUES_PER_INT32

TILE_ROWS = 16


def to_tiles(packed: torch.Tensor) -> torch.Tensor:
    """Convert `weight_packed`, int32 [N, K/8], to tiles, int32 [N/16, 2K]. N must be a multiple of 16."""
    pairs = packed.contiguous().view(torch.uint8)
    rows, half = pairs.shape  # a byte holds two values of one output channel, adjacent along K
    even, odd = pairs.view(-1, TILE_ROWS // 2, 2, half).unbind(2)
    tiles = pairs.new_empty(rows // TILE_ROWS, half, 2, TILE_ROWS // 2)
    tiles[:, :, 0] = ((even & 0xF) | (odd << 4)).transpose(1, 2)
    tiles[:, :, 1] = ((even >> 4) | (odd & 0xF0)).transpose(1, 2)
    return tiles.view(-1).view(torch.int32).view(-1, 2 * half * TILE_ROWS // VALUES_PER_INT32)


def from_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """Invert `to_tiles`: int32 [N/16, 2K] -> int32 [N, K/8]."""
    low, high = tiles.contiguous().view(torch.uint8).view(len(tiles), -1, 2, TILE_ROWS // 2).unbind(2)
    pairs = low.new_empty(len(tiles), TILE_ROWS // 2, 2, low.shape[1])  # low and high: [N/16, K/2, 8]
    pairs[:, :, 0] = ((low & 0xF) | (high << 4)).transpose(1, 2)
    pairs[:, :, 1] = ((low >> 4) | (high & 0xF0)).transpose(1, 2)
    return pairs.view(len(tiles) * TILE_ROWS, -1).view(torch.int32)
