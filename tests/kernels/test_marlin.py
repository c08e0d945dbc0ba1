"""Marlin's layout of a stack of experts, beside vLLM's plain PyTorch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from marlin_reference import random_stack, vllm_layout

from qarl.bench.costs.counting import counting
from qarl.kernels.int4 import CODES, MARLIN, SCALES, TILES, from_marlin, to_marlin

CASES = [((1, 64, 16), 16), ((3, 64, 48), 16), ((2, 192, 64), 32), ((5, 128, 32), 32), ((4, 64, 16), 8)]
"""Sizes and group sizes: one tile, odd numbers of tiles, one and several scales in a row."""


@pytest.mark.parametrize(("sizes", "group_size"), CASES, ids=str)
def test_the_layout_is_vllms_and_goes_back(sizes: tuple[int, int, int], group_size: int) -> None:
    torch.manual_seed(0)
    tensors = random_stack(*sizes, group_size)
    found = to_marlin(tensors)
    codes, scales = vllm_layout(tensors, group_size)
    assert torch.equal(found[CODES], codes) and torch.equal(found[SCALES], scales)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in from_marlin(found).items())


@pytest.mark.parametrize("layout", [TILES, MARLIN], ids=lambda layout: layout.codes)
def test_layouts_of_parts_are_the_layout_of_the_whole(layout) -> None:
    tensors = random_stack(5, 128, 64, 32)
    whole = layout.convert(tensors)
    for part in (slice(0, 3), slice(3, 5)):
        assert layout.fits((part.stop - part.start, 128, 64))
        for name, tensor in layout.convert({name: tensor[part] for name, tensor in tensors.items()}).items():
            assert torch.equal(tensor, whole[name][part])


def test_what_marlin_cannot_read_has_no_layout() -> None:
    for sizes in ((2, 96, 32), (2, 64, 24)):
        assert not MARLIN.fits(sizes)
        with pytest.raises(ValueError, match="multiples"):
            to_marlin(random_stack(*sizes, 8))
    assert not MARLIN.fits((64, 32)), "a dense weight"


@pytest.mark.parametrize("experts", [1, 128])
def test_operations_do_not_grow_with_the_number_of_experts(experts: int) -> None:
    packed = torch.empty(experts, 128, 32, dtype=torch.int32, device="meta")
    scale = torch.empty(experts, 128, 2, dtype=torch.bfloat16, device="meta")
    with counting() as there:
        made = to_marlin({"weight_packed": packed, "weight_scale": scale})
    with counting() as back:
        from_marlin(made)
    assert (there.counts.kernels, back.counts.kernels) == (9, 3) and not (there.counts.syncs or back.counts.syncs)
