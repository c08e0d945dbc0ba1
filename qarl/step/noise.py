"""Compare |δ| before the first update with the model's own rounding noise (`qarl.align.rounding_noise`).

It takes three forwards of a few responses: one with the published tensors, and `qarl.align.rounding_noise.DRAWS`. The
forward is the closest to the engine's that the trainer has. It multiplies by the published tensors, also at level
`off`, and has the arithmetic of level `model` where that exists, also at `linears` and `off`.

A backend says which of its models cannot get that arithmetic (`can_be_aligned`), runs its own forward, and adds up the
sums of all its ranks before `NoiseComparison.check`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from qarl.align.levels import engine_arithmetic
from qarl.align.rounding_noise import Roots
from qarl.config.level import Level
from qarl.metrics.mismatch_limit import check_noise, times_noise
from qarl.quant.convert import published_forward
from qarl.schemes import Scheme
from qarl.schemes.kernel_choice import KernelChoice

RESPONSES = 16
"""Number of responses that a comparison takes, at most."""
SumOverRanks = Callable[[list[float]], list[float]]
"""A function that returns the sum of each number over all ranks."""


@dataclass(frozen=True)
class TrainedModel:
    """The trainer's model, as the comparison sees it.

    module           a transformers causal LM, which FSDP may shard
    scheme, ignore   the quantization scheme, and the modules that stay unquantized
    align            the alignment level that was applied
    limit_level      the level whose limit on the mismatch applies
    kernels          a value of `quant.kernels`
    can_be_aligned   whether the module can get the arithmetic of level `model` for a few forwards
    dtype            dtype of that arithmetic, or None for the module's own
    """

    module: Any
    scheme: Scheme
    ignore: tuple[str, ...]
    align: Level
    limit_level: Level
    kernels: KernelChoice = KernelChoice.ENGINE
    can_be_aligned: bool = True
    dtype: torch.dtype | None = None

    @property
    def forwards_without_published_tensors(self) -> bool:
        return self.scheme.quantized and not self.align.low_bit


@dataclass(frozen=True)
class NoiseComparison:
    """|δ| beside the rounding noise.

    level    the alignment level whose arithmetic the compared forward had
    delta    sum over tokens of the square root of |δ|
    noise    sum over tokens of the square root of |noise|
    tokens   number of compared tokens
    """

    level: Level
    delta: float
    noise: float
    tokens: float

    @property
    def times(self) -> float:
        """How many times larger |δ| is than the noise. NaN if no token was compared."""
        return times_noise(self.delta, self.noise, self.tokens)

    def over_ranks(self, summed: SumOverRanks) -> NoiseComparison:
        """Return the comparison of all ranks' tokens. Every rank must call this, if `summed` is a collective."""
        delta, noise, tokens = summed([self.delta, self.noise, self.tokens])
        return NoiseComparison(self.level, delta, noise, tokens)

    def check(self) -> None:
        """Raise MismatchError if |δ| is more than rounding explains."""
        check_noise(self.times, level=self.level, tokens=self.tokens)


def has_noise_limit(level: Level, mismatch_limit: float | None) -> bool:
    """Return whether the noise limits a run: not if `quant.mismatch_limit` is set, which replaces this limit, nor at
    level `exact`, where there is no noise."""
    return mismatch_limit is None and level.tolerance.has_noise_limit


def compare_with_noise(
    trained: TrainedModel,
    log_probs: Callable[[], torch.Tensor],
    rollout: torch.Tensor,
    mask: torch.Tensor,
) -> NoiseComparison:
    """Compare the engine's log-probs with those of the trainer's closest forward.

    `log_probs`: runs the trainer's forward and returns FP32 log-probs [B, T]. `rollout`: the engine's log-probs [B, T].
    `mask`: whether a position has a token, [B, T]."""
    level = trained.limit_level
    roots = Roots()
    with ExitStack() as stack:
        if not level.follows_engine and trained.can_be_aligned:
            arithmetic = engine_arithmetic(trained.module, dtype=trained.dtype)
            level = stack.enter_context(arithmetic) or level
        if trained.forwards_without_published_tensors:
            published = published_forward(
                trained.module, trained.scheme, trained.ignore, kernels=trained.kernels
            )
            stack.enter_context(published)
        roots.add(trained.module, log_probs, rollout, mask)
    return NoiseComparison(level, roots.delta, roots.noise, roots.tokens)
