"""Layouts of int4 weights beside vLLM's, and what a kernel makes of a weight for one forward."""

from __future__ import annotations

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from marlin_reference import random_stack, vllm_layout

from qarl.kernels.cpu.torch_linears import upcast_e4m3
from qarl.kernels.cpu.vllm_linears import (
    TILES,
    VllmCpuInt8Linear,
    VllmCpuWNA16Linear,
    from_tiles,
    to_tiles,
)
from qarl.kernels.int4 import CODES, MARLIN, SCALES, from_marlin, to_marlin
from qarl.quant import get_scheme, quantize

CPU = torch.device("cpu")


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).bfloat16()


@needs_w4a16_cpu
def test_int4_from_tiles_is_int4_from_the_wire() -> None:
    tensors = quantize(weight(96, 64), get_scheme("w4a16", 32)).tensors
    tiles = {
        "weight_tiles": to_tiles(tensors["weight_packed"]),
        "weight_scale": tensors["weight_scale"],
    }
    assert torch.equal(from_tiles(tiles["weight_tiles"]), tensors["weight_packed"])
    expected = VllmCpuWNA16Linear.prepare(tensors)
    for layout in (
        VllmCpuWNA16Linear.prepare_gathered(tiles),
        VllmCpuWNA16Linear.prepare_gathered(tensors),
    ):
        assert all(torch.equal(a, b) for a, b in zip(layout, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 3, 64, 600])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_without_a_handler_has_the_same_bits(rows: int, bias: bool) -> None:
    if why_not := VllmCpuInt8Linear.unavailable(CPU, (160, 96)):
        pytest.skip(why_not)
    tensors = quantize(weight(160, 96), get_scheme("w8a8")).tensors
    x, added = weight(rows, 96), weight(1, 160)[0] if bias else None
    expected = VllmCpuInt8Linear.linear(x, VllmCpuInt8Linear.prepare(tensors), added)
    assert torch.equal(
        VllmCpuInt8Linear.linear(x, VllmCpuInt8Linear.prepare_gathered(tensors), added), expected
    )


def test_e4m3_is_upcast_exactly() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[~codes.float().isnan()]
    assert len(codes) == 254
    assert torch.equal(upcast_e4m3(codes).view(torch.int32), codes.float().view(torch.int32))


MARLIN_CASES = [
    ((1, 64, 16), 16),
    ((3, 64, 48), 16),
    ((2, 192, 64), 32),
    ((5, 128, 32), 32),
    ((4, 64, 16), 8),
]
"""Sizes and group sizes: one tile, odd numbers of tiles, one and several scales in a row."""


@pytest.mark.parametrize(("sizes", "group_size"), MARLIN_CASES, ids=str)
def test_the_layout_is_vllms_and_goes_back(sizes: tuple[int, int, int], group_size: int) -> None:
    pytest.importorskip("vllm")
    torch.manual_seed(0)
    tensors = random_stack(*sizes, group_size)
    layout = to_marlin(tensors)
    codes, scales = vllm_layout(tensors, group_size)
    assert torch.equal(layout[CODES], codes) and torch.equal(layout[SCALES], scales)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in from_marlin(layout).items())


@pytest.mark.parametrize("layout", [TILES, MARLIN], ids=lambda layout: layout.codes)
def test_layouts_of_parts_are_the_layout_of_the_whole(layout) -> None:
    tensors = random_stack(5, 128, 64, 32)
    whole = layout.convert(tensors)
    for part in (slice(0, 3), slice(3, 5)):
        assert layout.fits((part.stop - part.start, 128, 64))
        for name, tensor in layout.convert(
            {name: tensor[part] for name, tensor in tensors.items()}
        ).items():
            assert torch.equal(tensor, whole[name][part])
