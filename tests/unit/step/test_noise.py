"""`qarl.step.noise`: which forward of the trainer is compared with the engine, and at which level."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from qarl.config.level import Level
from qarl.metrics.mismatch_limit import MismatchError
from qarl.schemes import get_scheme
from qarl.step import noise
from qarl.step.noise import NoiseComparison, TrainedModel, compare_with_noise, has_noise_limit


class Model(nn.Module):
    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize(
    ("align", "scheme", "can_be_aligned", "exists", "expected"),
    [
        ("off", "w4a16", True, True, ("model", ["arithmetic", "published"])),
        ("off", "w4a16", False, True, ("off", ["published"])),
        ("off", "bf16", True, True, ("model", ["arithmetic"])),
        ("linears", "w8a8", True, False, ("linears", ["arithmetic"])),
        ("model", "w8a8", True, True, ("model", [])),
    ],
)
def test_the_closest_forward_is_compared(
    monkeypatch: pytest.MonkeyPatch,
    align: str,
    scheme: str,
    can_be_aligned: bool,
    exists: bool,
    expected: tuple[str, list[str]],
) -> None:
    entered: list[str] = []

    @contextmanager
    def arithmetic(*arguments: Any, **more: Any) -> Iterator[Level | None]:
        entered.append("arithmetic")
        yield Level.MODEL if exists else None

    @contextmanager
    def published(*arguments: Any, **more: Any) -> Iterator[None]:
        entered.append("published")
        yield

    monkeypatch.setattr(noise, "engine_arithmetic", arithmetic)
    monkeypatch.setattr(noise, "published_forward", published)
    trained = TrainedModel(
        Model(),
        get_scheme(scheme),
        (),
        align=Level(align),
        limit_level=Level(align),
        can_be_aligned=can_be_aligned,
    )
    mask = torch.tensor([[True, True, False]])
    comparison = compare_with_noise(
        trained, lambda: torch.zeros(1, 3), torch.full((1, 3), 4.0), mask
    )
    assert (comparison.level, entered) == expected
    assert (comparison.delta, comparison.noise, comparison.tokens) == (4.0, 0.0, 2.0)


def test_all_ranks_are_judged_together() -> None:
    """Half of the tokens have no difference, and the others three times the noise."""
    far = NoiseComparison(Level.MODEL, delta=300.0, noise=100.0, tokens=10_000.0)
    with pytest.raises(MismatchError, match="compute different models"):
        far.check()
    far.over_ranks(lambda sums: [sums[0], sums[1] * 10, sums[2] * 2]).check()


def test_who_is_compared() -> None:
    assert has_noise_limit(Level.LINEARS, None) and has_noise_limit(Level.MODEL, None)
    assert not has_noise_limit(Level.EXACT, None) and not has_noise_limit(Level.MODEL, 0.5)
