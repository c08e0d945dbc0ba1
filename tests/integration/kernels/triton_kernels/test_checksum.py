"""The checksum in one pass, and NaN and Inf, against the PyTorch that defines both."""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels.triton.checksum import add_checksum
from qarl.quant.quantize import FLOAT_BITS, has_nonfinite
from qarl.rollout.publish import checksum as module
from qarl.rollout.publish.checksum import BLOCK, checksum, weights

WORDS = [1, 2, 77, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 13]


def by_kernel(tensor: torch.Tensor, *, finite: bool = True) -> tuple[int, bool]:
    result = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    inner, outer = (weights(seed, count, result.device) for seed, count in ((1, BLOCK), (2, 64)))
    add_checksum(tensor, inner, outer, result, FLOAT_BITS.get(tensor.dtype) if finite else None)
    digest, bad = result.tolist()
    assert bad in (0, 1)
    return digest, bool(bad)


@pytest.mark.parametrize("words", [0, *WORDS])
@pytest.mark.parametrize("dtype", [*FLOAT_BITS, torch.int8, torch.int32, torch.int64], ids=str)
def test_the_bits_of_pytorch(words: int, dtype: torch.dtype) -> None:
    """Bytes are random, so the floats hold NaN too. The tensor begins at the second word of its storage."""
    data = torch.randint(0, 256, (8 * words + 8,), dtype=torch.uint8, device=DEVICE)[8:]
    tensor = data.view(dtype)
    floats = dtype in FLOAT_BITS and bool(words)
    assert by_kernel(tensor) == (checksum(tensor).item(), floats and has_nonfinite(tensor).item())
    assert by_kernel(tensor, finite=False) == (checksum(tensor).item(), False)


@pytest.mark.parametrize("dtype", FLOAT_BITS, ids=str)
def test_nan_and_inf_are_found_wherever_they_are(dtype: torch.dtype) -> None:
    bits = FLOAT_BITS[dtype]
    size = 8 * (BLOCK + 3) // dtype.itemsize
    largest = torch.full((size,), bits.nonfinite - 1, dtype=bits.integer, device=DEVICE)
    sign = -1 - bits.magnitude_mask if bits.integer != torch.uint8 else 0x80
    largest[::2] |= sign
    assert not by_kernel(largest.view(dtype))[1]
    for place in (0, 1, size // 2 + 1, size - 1):
        for value in (bits.nonfinite, bits.magnitude_mask, bits.nonfinite | sign):
            spoilt = largest.clone()
            spoilt[place] = value
            assert by_kernel(spoilt.view(dtype))[1], (place, value)


@pytest.mark.parametrize("small", [-1, 64, 8 * BLOCK, 1 << 20])
@pytest.mark.parametrize("finite", [False, True])
def test_a_unit_by_the_kernel_is_a_unit_by_pytorch(
    finite: bool, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that the kernel cannot read are checked as before, and all results are in the order of the tensors."""
    raw = torch.randint(0, 256, (3 * 8 * BLOCK + 21,), dtype=torch.uint8)
    infinite = torch.full((4 * BLOCK + 4,), torch.inf).bfloat16()
    tensors = [
        raw[: 8 * BLOCK + 16].view(torch.int32),
        raw[3:],
        torch.randn(33, 40).bfloat16().t(),
        torch.zeros(0),
    ]
    tensors += [infinite, torch.ones(6), torch.ones(6).double(), torch.ones(3)]
    tensors = [tensor.to(DEVICE) for tensor in tensors]
    monkeypatch.setattr(module, "_has_kernel", lambda device: False)
    wanted = module.unit_checksums(tensors, finite=finite)
    assert module.nonfinite_by_kernel(tensors[4:6]) is None
    flags = [has_nonfinite(tensor).item() for tensor in tensors[4:6]]
    monkeypatch.setattr(module, "_has_kernel", lambda device: True)
    monkeypatch.setattr(module, "_SMALL", small)
    monkeypatch.setattr(module, "is_gpu", lambda device: True)
    assert [module._way(tensor) for tensor in tensors].count("kernel") == 5
    checked = module.unit_checksums(tensors, finite=finite)
    assert torch.equal(checked[0], wanted[0])
    assert bad(checked) == bad(wanted) == ({4} if finite else set())
    assert module.nonfinite_by_kernel(tensors[4:6]).tolist() == flags == [True, False]


def bad(checked: torch.Tensor) -> set[int]:
    return set(checked[1].nonzero().flatten().tolist())


def test_the_kernel_is_used_only_where_it_agrees_with_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device(DEVICE)
    assert module._has_kernel.__wrapped__(device)
    monkeypatch.setattr(module, "_check_each", lambda tensors, finite: torch.zeros(2, 5))
    with pytest.warns(UserWarning, match="checksums with PyTorch"):
        assert not module._has_kernel.__wrapped__(device)
