"""The coding of changed words, bit by bit: what was changed comes back, and nothing else."""

from __future__ import annotations

import pytest
import torch

from qarl.rollout.remote.delta import apply_changes, compare, find_changes, fingerprint_of

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32, torch.int64)
SIZES = (0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 255, 257, 1000, 65_537)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each word, [words, bytes]."""
    return tensor.view(-1).view(torch.uint8).view(tensor.numel(), tensor.element_size())


def random_bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """All bit patterns occur, NaN with any payload and signed zeros too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator
    ).view(dtype)


def with_other_words(tensor: torch.Tensor, positions: list[int], bit: int = 0) -> torch.Tensor:
    changed = tensor.clone()
    rows_of(changed)[positions, bit // 8 % tensor.element_size()] ^= 1 << bit % 8
    return changed


def changes(before: torch.Tensor, now: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    compared = compare(before, now)
    return find_changes(compared, int(compared.count))


def check(before: torch.Tensor, now: torch.Tensor) -> int | None:
    """Apply the payload to a copy. Return the payload's bytes."""
    changed, payload = changes(before, now)
    assert changed == int((rows_of(before) != rows_of(now)).any(1).sum())
    if payload is None:
        return None
    assert payload.dtype == torch.uint8 and payload.numel() < now.nbytes
    copy = before.clone()
    apply_changes(copy, payload)
    assert raw(copy) == raw(now)
    apply_changes(copy, payload)  # values are absolute
    assert raw(copy) == raw(now)
    return payload.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", SIZES)
def test_every_size_and_share(dtype, count):
    before = random_bits(count, dtype)
    assert check(before, before.clone()) is None
    everything = with_other_words(before, list(range(count)))
    assert check(before, everything) is None, "all words changed: the tensor itself is smaller"
    for every in (2, 10, 300):
        check(before, with_other_words(before, list(range(count - 1, -1, -every))))
    for position in {0, count // 2, count - 1} & set(range(count)):
        size = check(before, with_other_words(before, [position]))
        assert size is not None or before.nbytes <= 16 + 8 + -(-count // 8)


@pytest.mark.parametrize(
    "gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65_533, 65_534, 65_535, 65_536, 131_070]
)
def test_gaps_around_the_escapes(gap):
    before = random_bits(140_000, torch.int32)
    for start in (0, 1, 255, 5_000):
        positions = [p for p in (start, start + gap + 1, start + 2 * gap + 2) if p < 140_000]
        assert check(before, with_other_words(before, positions)) is not None


def test_bits_count_and_not_numbers():
    """NaN differs from no other NaN as a number, and -0 equals 0."""
    quiet, other = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    zeros = torch.zeros(100, dtype=torch.bfloat16)
    before, now = zeros.clone(), zeros.clone()
    before[3] = now[3] = quiet
    assert changes(before, now)[0] == 0
    now[3] = other
    now[7] = -0.0
    assert changes(before, now)[0] == 2
    check(before, now)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_views_and_shapes(offset):
    """A tensor need not begin at eight bytes, and a payload lies anywhere in a transport's buffer."""
    base = random_bits(1_000, torch.bfloat16)[offset : offset + 960].view(30, 32)
    now = with_other_words(base.reshape(-1), [0, 1, 500, 959]).view(30, 32)
    payload = changes(base, now)[1]
    moved = torch.zeros(payload.numel() + offset, dtype=torch.uint8)[offset:]
    moved.copy_(payload)
    copy = base.clone()
    apply_changes(copy, moved)
    assert raw(copy) == raw(now)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda payload: payload[:8], "has no header"),
        (lambda payload: payload.int(), "has no header"),
        (
            lambda payload: torch.cat((torch.full_like(payload[:8], 99), payload[8:])),
            "header says coding",
        ),
        (lambda payload: payload[:-8], "payload"),
    ],
    ids=["short", "other dtype", "other coding", "cut off"],
)
def test_a_damaged_payload_changes_nothing(damage, message):
    base = random_bits(1_000, torch.bfloat16)
    payload = changes(base, with_other_words(base, [0, 1, 500, 959]))[1]
    copy = base.clone()
    with pytest.raises(ValueError, match=message):
        apply_changes(copy, damage(payload))
    assert raw(copy) == raw(base)


@pytest.mark.parametrize(
    ("count", "last"), [(1_000, 999), (1_000, 1_000), (1_000, 1_001), (70_000, 70_000)]
)
def test_a_position_behind_the_last_word_is_refused(count, last):
    """A payload of a larger tensor, whose position is one word too far, must not be applied to a smaller one."""
    base = random_bits(count, torch.bfloat16)
    larger = random_bits(count + 8, torch.bfloat16)
    payload = changes(larger, with_other_words(larger, [3, last]))[1]
    copy = base.clone()
    if last < count:
        apply_changes(copy, payload)
        return
    with pytest.raises(ValueError, match="positions do not fit 2 of"):
        apply_changes(copy, payload)
    assert raw(copy) == raw(base)


def test_more_positions_than_values_are_refused():
    base = random_bits(1_000, torch.bfloat16)
    payload = changes(base, with_other_words(base, [3, 500, 700]))[1]
    payload[8] = 2  # of the three words in the header
    copy = base.clone()
    with pytest.raises(ValueError, match="positions do not fit 2 of"):
        apply_changes(copy, payload)
    assert raw(copy) == raw(base)


def test_a_fingerprint_depends_on_version_names_and_checksums():
    digests = {"a": 1, "b": 2}
    fingerprint = fingerprint_of(7, digests)
    assert fingerprint == fingerprint_of(7, {"b": 2, "a": 1})
    others = [
        (8, digests),
        (7, {"a": 1}),
        (7, {"a": 1, "b": 3}),
        (7, {"a": 2, "b": 1}),
        (7, {"a": 1, "c": 2}),
    ]
    assert len({fingerprint, *(fingerprint_of(*other) for other in others)}) == len(others) + 1
