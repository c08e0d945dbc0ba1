"""The checksum of a publish, against the same sum in Python's integers."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qarl.quant.quantize import has_nonfinite
from qarl.rollout.publish import checksum
from qarl.rollout.publish.checksum import checksums
from qarl.rollout.publish.manifest import not_finite


def checksum_of(tensor: torch.Tensor) -> int:
    return checksums([tensor])[0]


def by_hand(data: bytes) -> int:
    """The definition, word by word, in Python's integers."""
    block, mask = checksum.BLOCK, (1 << 64) - 1

    def mixed(word: int, weight: int) -> int:
        word = (word ^ (word >> 32)) * weight & mask
        return word ^ (word >> 32)

    inner = checksum.weights(1, block, torch.device("cpu")).tolist()
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
    outer = checksum.weights(2, len(words) // block + 1, torch.device("cpu")).tolist()
    total = len(data)
    for number in range(0, len(words), block):
        row = (
            sum(mixed(word, inner[i]) for i, word in enumerate(words[number : number + block]))
            & mask
        )
        total += mixed(row, outer[number // block]) if len(words) > block else row
    if len(data) % 8:
        tail = int.from_bytes(data[len(data) // 8 * 8 :], "little")
        total += mixed(tail, checksum.weights(3, 1, torch.device("cpu")).item())
    total &= mask
    return total - (1 << 64) if total >= 1 << 63 else total


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, 4096 * 8, 4096 * 8 + 8, 4096 * 8 + 13, 3 * 4096 * 8 + 24]
)
def test_it_is_the_sum_that_it_says(size, monkeypatch):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert checksum_of(data) == by_hand(data.numpy().tobytes())
    monkeypatch.setattr(checksum, "CHUNK", 4096)
    assert checksum_of(data) == by_hand(data.numpy().tobytes()), "in chunks"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.float8_e4m3fn]
)
def test_every_flipped_bit_shows(dtype):
    tensor = torch.randn(7, 11).to(dtype)
    before = checksum_of(tensor)
    raw = tensor.view(torch.uint8).view(-1)
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert checksum_of(tensor) != before, (place, bit)
            raw[place] ^= 1 << bit
    assert checksum_of(tensor) == before


@pytest.mark.parametrize("bit", [0, 7, 31, 32, 47, 62, 63])
def test_the_same_bit_flipped_in_several_words_shows(bit):
    """Signs above all: an odd multiple of 2**63 is 2**63, and two of them are nothing."""
    words = torch.randint(-(2**62), 2**62, (3 * checksum.BLOCK + 77,), dtype=torch.int64)
    before, flip = checksum_of(words), torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    for places in (
        [0, 1],
        [5, 4096 + 5],
        [3, 9000, 9001, 12300],
        list(range(0, 4096, 4)),
        list(range(12365)),
    ):
        damaged = words.clone()
        damaged[places] ^= flip
        assert checksum_of(damaged) != before, places
    signs = torch.randn(256, 256).bfloat16()
    negated = signs.clone()
    negated.view(-1)[3::4] *= -1
    assert checksum_of(negated) != checksum_of(signs)


def test_swapped_words_and_zeros_at_the_end_show():
    tensor = torch.arange(10000, dtype=torch.int64)
    swapped = tensor.clone()
    swapped[[3, 4000]] = tensor[[4000, 3]]
    blocks = tensor.clone()
    blocks[:4096], blocks[4096:8192] = tensor[4096:8192].clone(), tensor[:4096].clone()
    longer = torch.cat([tensor, torch.zeros(1, dtype=torch.int64)])
    assert (
        len({checksum_of(tensor), checksum_of(swapped), checksum_of(blocks), checksum_of(longer)})
        == 4
    )


def test_strides_and_alignment_do_not_matter():
    tensor = torch.randn(32, 24).bfloat16()
    assert checksum_of(tensor.t()) == checksum_of(tensor.t().contiguous())
    shifted = torch.cat([torch.zeros(3), torch.randn(50)]).bfloat16()
    assert checksum_of(shifted[3:]) == checksum_of(shifted[3:].clone())
    raw = torch.randint(0, 256, (101,), dtype=torch.uint8)
    assert checksum_of(raw[3:]) == checksum_of(raw[3:].clone())


def test_several_at_once_are_each_alone():
    tensors = [torch.randn(3), torch.zeros(0), torch.randint(-8, 8, (5, 9), dtype=torch.int8)]
    assert checksums(tensors) == [checksum_of(t) for t in tensors]
    assert checksums([]) == []


class Watcher(TorchDispatchMode):
    """Counts the numbers that Python waits for, and measures the largest tensor that an operator allocates."""

    waits = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.waits += function is torch.ops.aten._local_scalar_dense.default
        inputs = {
            tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)
        }
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in inputs:
            self.largest = max(self.largest, result.nbytes)
        return result


def test_many_tensors_are_looked_at_with_one_wait_and_little_memory(monkeypatch):
    monkeypatch.setitem(has_nonfinite.__globals__, "_AT_ONCE", 1000)
    named = [(str(i), torch.zeros(70, 100, dtype=torch.bfloat16)) for i in range(12)]
    named[7][1][69, 99] = torch.inf
    named[3][1][0, 0] = torch.nan
    with Watcher() as watched:
        assert not_finite(named) == ["3", "7"]
    assert watched.waits <= 1 and watched.largest <= 2000


@pytest.mark.parametrize("offset", [0, 3])
def test_a_large_tensor_off_the_cpu_needs_no_large_intermediate_tensors(offset):
    """An embedding of 1.2 GB on the meta device, which takes the way of a GPU."""
    data = torch.empty(151936 * 4096 * 2 + offset, dtype=torch.uint8, device="meta")[offset:]
    with Watcher() as watched:
        checksum.checksum(data)
    assert watched.largest <= 8 * checksum._GPU_CHUNK <= 32 * 2**20
