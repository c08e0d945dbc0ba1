"""Layouts of int4 weights that a rank can make of its own shard, so that FSDP2 gathers what a kernel reads.

A kernel names its layout in the attribute `layout`, and its `prepare` takes wire tensors or tensors in this layout. The
shard is converted once per optimizer step (`qarl.quant.weight_shard`). The backward and the publish restore the wire
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qarl.kernels.cpu.tiles import TILE_ROWS, from_tiles, to_tiles
from qarl.kernels.cuda import marlin

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A layout of `weight_packed` and `weight_scale`, of a weight [N, K] or a stack [E, N, K].

    If a weight is split along its first dimension into parts that fit, the layouts of the parts, one after another, are
    that of the weight.

    `codes`: name of the tensor with the codes. `fits`: whether a part of this shape has the layout. `convert`: makes
    the layout from wire tensors that fit, with the same first dimension. `restore`: its inverse.
    """

    codes: str
    fits: Callable[[tuple[int, ...]], bool]
    convert: Callable[[Tensors], dict[str, torch.Tensor]]
    restore: Callable[[Tensors], dict[str, torch.Tensor]]


def _to_tiles(tensors: Tensors) -> dict[str, torch.Tensor]:
    packed = tensors["weight_packed"]
    tiles = to_tiles(packed.flatten(0, -2)).unflatten(0, (*packed.shape[:-2], -1))
    return {"weight_tiles": tiles, "weight_scale": tensors["weight_scale"]}


def _from_tiles(tensors: Tensors) -> dict[str, torch.Tensor]:
    tiles = tensors["weight_tiles"]
    packed = from_tiles(tiles.flatten(0, -2)).unflatten(0, (*tiles.shape[:-2], -1))
    return {"weight_packed": packed, "weight_scale": tensors["weight_scale"]}


TILES = Layout("weight_tiles", lambda shape: shape[-2] % TILE_ROWS == 0, _to_tiles, _from_tiles)
"""The tiles of vLLM's CPU kernel (`qarl.kernels.cpu.tiles`). Scales stay as they are."""
MARLIN = Layout(marlin.CODES, marlin.fits, marlin.to_marlin, marlin.from_marlin)
"""The layout of vLLM's Marlin kernel for experts."""


def wire_tensors(tensors: Tensors) -> Tensors:
    """Return `tensors`, which may be in one of these layouts, as wire tensors without `weight_shape`."""
    for layout in (TILES, MARLIN):
        if layout.codes in tensors:
            return layout.restore(tensors)
    return tensors
