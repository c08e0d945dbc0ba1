"""Stochastic rounding: against NumPy's 64-bit integers and against the distribution that it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from same_bytes import same_bytes

from qarl.optim import rounding
from qarl.optim.muon_adamw import MuonAdamW
from qarl.optim.rounding import Region, random_bits, rounding_key, stochastic_round

KEY = rounding_key(0, "w", 1)


def splitmix64(key: int, positions: np.ndarray) -> np.ndarray:
    """The generator as its paper writes it, in NumPy's unsigned integers."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def test_random_bits_are_the_upper_bits_of_splitmix64() -> None:
    positions = np.concatenate([np.arange(1000), 2**31 + np.arange(1000), 2**40 + np.arange(1000)])
    expected = (splitmix64(KEY, positions) >> np.uint64(48)).astype(np.int64)
    assert np.array_equal(random_bits(KEY, torch.from_numpy(positions)).numpy(), expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("at_a_time", [7, 2**24])
def test_parts_are_rounded_as_the_whole(
    dim: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "_BLOCK_ON_CPU", at_a_time)
    source = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(1))
    whole = stochastic_round(source, KEY)
    size = source.shape[dim]
    for start, stop in ((0, 2), (2, size), (3, 3)):
        region = Region(tuple(source.shape), dim, start, stop)
        part = source.narrow(dim, start, stop - start).contiguous()
        assert same_bytes(
            stochastic_round(part, KEY, region), whole.narrow(dim, start, stop - start).contiguous()
        )


def test_stochastic_rounding_is_unbiased() -> None:
    """200000 draws; each mean within 5 standard errors of the value (a bias of 1% of the gap would be 9 or more)."""
    draws = 200_000
    low, high = 1.0, 1.0 + 2.0**-7
    for update, sign in enumerate((1.0, -1.0)):
        for fraction in (0.0625, 0.3, 0.5, 0.9):
            value = torch.tensor(sign * (low + fraction * (high - low)))
            rounded = stochastic_round(
                value.repeat(draws), rounding_key(0, str(fraction), update)
            ).double()
            assert set(rounded.abs().unique().tolist()) == {low, high}
            standard_error = (high - low) * math.sqrt(fraction * (1 - fraction) / draws)
            assert abs(rounded.mean() - value.double()) < 5 * standard_error


def test_stochastic_rounding_keeps_every_bf16_number() -> None:
    every = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    )
    rounded = stochastic_round(every.float(), KEY)
    numbers = ~every.isnan()
    assert same_bytes(rounded[numbers], every[numbers])
    assert rounded[~numbers].isnan().all()


def test_every_update_of_the_optimizer_draws_new_bits() -> None:
    """64 updates by a quarter of a BF16 step move every weight by 16 steps, give or take sqrt(64 * 1/4 * 3/4) = 3.5.

    With the bits of one update in all of them, a weight would move by all 64 steps or by none."""
    step = 2.0**-7
    weight = torch.nn.Parameter(torch.full((64, 64), 1.75, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)  # AdamW's update is 1 as long as the gradient is
    optimizer = MuonAdamW([("weight", weight)], lr=step / 4, eps=0.0)
    for _ in range(64):
        optimizer.step()
    moved = (1.75 - weight.detach().double()) / step
    assert abs(float(moved.mean()) - 16) < 5 * math.sqrt(12 / moved.numel())
    assert float(moved.std()) == pytest.approx(math.sqrt(12), rel=0.1)


def test_a_key_depends_on_seed_name_and_update() -> None:
    keys = [
        rounding_key(seed, name, update)
        for seed in (0, 1)
        for name in ("a", "b")
        for update in (1, 2)
    ]
    assert len(set(keys)) == len(keys)
