"""The order in which QaRL's W4A16 kernel reads int4 codes: one nibble of all int16 for each quarter of a block of K.

A row of the wire format has the codes of K in ascending order, four in an int16. Here a row is cut into blocks of 128
codes, 32 int16 each, and nibble j of int16 h holds the code of column 32 j + h of its block. So the nibbles at one
position of a block, a plane, are 32 adjacent columns: the kernel takes them out of all int16 at once, and multiplies
them by 32 adjacent columns of x (`qarl.kernels.triton.w4a16`). If the last block has fewer columns, its int16 are fewer
too: with c columns, nibble j of int16 h is column j c / 4 + h.

A row of codes stays a row with as many bytes, so fused weights may be converted together or one by one. Each scale is
there twice, in both halves of an int32. So a thread copies it to shared memory ahead of its use without waiting, for
which two bytes are too few, and it fills the register by which two weights are multiplied.
"""

from __future__ import annotations

import torch

BLOCK = 128
"""Columns of K in a block."""
PLANES = 4
"""Nibbles of an int16."""


def to_planes(packed: torch.Tensor) -> torch.Tensor:
    """Convert codes int32 [N, K/8] of the wire format to planes, int32 [N, K/8] too.

    This is the reference of `qarl.kernels.triton.planes.to_planes`."""
    rows, words = packed.shape
    columns = 8 * words
    whole = columns - columns % BLOCK
    pairs = packed.contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).view(rows, columns)
    parts = (codes[:, :whole].reshape(rows, -1, PLANES, BLOCK // PLANES), codes[:, whole:])
    last = parts[1].reshape(rows, 1, PLANES, (columns - whole) // PLANES)
    halves = torch.cat([_halves(parts[0]), _halves(last)], dim=1)
    return halves.contiguous().view(torch.int32)


def to_pairs(scale: torch.Tensor) -> torch.Tensor:
    """Convert scales BF16 [N, K/g] to int32 [N, K/g] with a scale in both halves."""
    halves = scale.contiguous().view(torch.int16)[..., None]
    return halves.expand(*scale.shape, 2).contiguous().view(torch.int32)[..., 0]


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Join the codes uint8 [N, blocks, 4, h] of the planes to int16 [N, blocks h]."""
    nibbles = codes.to(torch.int32) << (4 * torch.arange(PLANES, device=codes.device))[:, None]
    return nibbles.sum(2, dtype=torch.int32).to(torch.int16).flatten(1)
