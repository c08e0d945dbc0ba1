"""The kernel that leaves Marlin's layout, against PyTorch on the CPU."""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels import int4
from qarl.kernels.triton.quantize import codes_from_marlin


@pytest.mark.parametrize("sizes", [(1, 64, 16), (3, 192, 48), (2, 128, 272)], ids=str)
def test_the_codes_come_back(sizes: tuple[int, int, int]) -> None:
    experts, rows, columns = sizes
    packed = torch.randint(-(2**31), 2**31, (experts, rows, columns // 8)).to(torch.int32)
    assert torch.equal(codes_from_marlin(int4._codes_to_marlin(packed).to(DEVICE)).cpu(), packed)


def test_what_does_not_fit_is_refused() -> None:
    for bad in (torch.zeros(1, 2, 128), torch.zeros(1, 2, 64, dtype=torch.int32)):
        with pytest.raises(ValueError, match="codes must be"):
            codes_from_marlin(bad.to(DEVICE))
