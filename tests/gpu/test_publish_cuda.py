"""What a publish computes on a device: checksums, and the search for numbers that are not finite."""

from __future__ import annotations

import pytest
import torch

from qarl.rollout.publish.checksum import _has_kernel, checksums, unit_checksums
from qarl.rollout.publish.manifest import not_finite

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("count", [1, 7, 65536, 3 * 2**22 + 5])
def test_a_checksum_is_the_same_on_both_devices(count: int, device: torch.device) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randint(-128, 128, (count,), dtype=torch.int8),
        torch.randn(count).bfloat16(),
        torch.randn(count),
    ]
    sums = checksums([tensor.to(device) for tensor in tensors])
    assert sums == checksums(tensors)
    changed = tensors[0].clone()
    changed[-1] += 1
    assert checksums([changed.to(device)])[0] != sums[0]


def test_a_unit_is_checked_by_the_kernel_as_on_a_cpu(device: torch.device) -> None:
    """Large and small tensors, with NaN in a large and Inf in a small one."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(8, 600, 512).bfloat16(),
        torch.randint(-9, 9, (3000, 1000)),
        torch.randn(64, 40),
        torch.ones(8),
    ]
    tensors[0][5, 7, 9], tensors[2][3, 3] = torch.nan, torch.inf
    assert _has_kernel(device)
    ours, wanted = (
        unit_checksums([t.to(where) for t in tensors], finite=True)
        for where in (device, torch.device("cpu"))
    )
    assert torch.equal(ours[0].cpu(), wanted[0])
    for checked in (ours, wanted):
        assert checked[1].nonzero().flatten().tolist() == [0, 2]


def test_a_checksum_of_a_large_embedding_needs_little_memory(device: torch.device) -> None:
    embedding = torch.randn(151936, 4096, dtype=torch.bfloat16, device=device)  # 1.2 GB
    checksums([embedding])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    checksums([embedding])
    peak = torch.cuda.max_memory_allocated() - before
    print(f"a checksum of {embedding.nbytes / 1e9:.1f} GB takes {peak / 1e6:.0f} MB")
    assert peak < 300e6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_nan_and_inf_are_found(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    good = (torch.randn(3 * 2**20 + 1) * 8).to(dtype)
    wrong = (
        [float("nan"), float("-nan")]
        if dtype.itemsize == 1
        else [float("nan"), float("inf"), float("-inf")]
    )
    tensors = [("good", good)]
    for place, number in zip((0, 777, -1), wrong, strict=False):
        bad = good.float().clone()
        bad[place] = number
        tensors.append((str(number), bad.to(dtype)))
    assert not_finite([(name, tensor.to(device)) for name, tensor in tensors]) == [
        str(number) for number in wrong
    ]
