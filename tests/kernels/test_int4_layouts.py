"""What a kernel makes of a weight for one forward: the same numbers as what it prepares once per optimizer step."""

from __future__ import annotations

import pytest
import torch
from cpu_features import needs_w4a16_cpu

from qarl.kernels.cpu.torch_ops import upcast_e4m3
from qarl.kernels.cpu.vllm_ops import VllmCpuInt8Linear, VllmCpuWNA16Linear
from qarl.kernels.int4 import from_tiles, to_tiles
from qarl.kernels.registry import LINEAR_KERNELS, prepare_gathered
from qarl.quant import get_scheme, quantize

CPU = torch.device("cpu")


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("shape", [(16, 8), (48, 40), (160, 96)])
def test_tiles_hold_the_codes_of_16_rows_at_one_place_along_k(shape: tuple[int, int]) -> None:
    rows, columns = shape
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    packed = torch.zeros(rows, columns // 8, dtype=torch.int32)
    for place in range(8):
        packed |= codes[:, place::8] << 4 * place
    tiles = to_tiles(packed)
    assert tiles.shape == (rows // 16, 2 * columns)
    data = tiles.view(torch.uint8).view(rows // 16, columns, 8).int()
    found = torch.stack((data & 15, data >> 4), dim=-1).view(rows // 16, columns, 16)
    assert torch.equal(found.transpose(1, 2).reshape(shape), codes)
    assert torch.equal(from_tiles(tiles), packed)
    assert torch.equal(torch.cat([to_tiles(part) for part in packed.split(16)]), tiles), "parts of whole tiles"


@needs_w4a16_cpu
def test_int4_from_tiles_is_int4_from_the_wire() -> None:
    tensors = quantize(weight(96, 64), get_scheme("w4a16", 32)).tensors
    tiles = {"weight_tiles": to_tiles(tensors["weight_packed"]), "weight_scale": tensors["weight_scale"]}
    expected = VllmCpuWNA16Linear.prepare(tensors)
    for found in (prepare_gathered(VllmCpuWNA16Linear, tiles), prepare_gathered(VllmCpuWNA16Linear, tensors)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 3, 64, 600])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_without_a_handler_has_the_same_bits(rows: int, bias: bool) -> None:
    if why_not := VllmCpuInt8Linear.unavailable("w8a8", CPU, (160, 96)):
        pytest.skip(why_not)
    tensors = quantize(weight(160, 96), get_scheme("w8a8")).tensors
    x, added = weight(rows, 96), weight(1, 160)[0] if bias else None
    expected = VllmCpuInt8Linear.linear(x, VllmCpuInt8Linear.prepare(tensors), added)
    assert torch.equal(VllmCpuInt8Linear.linear(x, prepare_gathered(VllmCpuInt8Linear, tensors), added), expected)


def test_e4m3_is_upcast_exactly() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[~codes.float().isnan()]
    assert len(codes) == 254
    assert torch.equal(upcast_e4m3(codes).view(torch.int32), codes.float().view(torch.int32))


def test_kernels_without_a_cheaper_way_prepare_as_always() -> None:
    reference = LINEAR_KERNELS["w4a8"][-1]
    tensors = quantize(weight(32, 64), get_scheme("w4a8", 32)).tensors
    assert prepare_gathered(reference, tensors) is tensors
