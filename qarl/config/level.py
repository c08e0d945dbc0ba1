"""`Level`: the values of `quant.align`, in order, with everything that is asked about them.

    off       the trainer is plain BF16, and only the rollout is quantized
    linears   low-bit GEMMs on the published tensors
    model     also the engine's rounding between the linears, and the best attention that the device has
    exact     `model` where attention is the engine's own operator, so that δ, the trainer's log-prob of a token minus
              the engine's, is 0

A level is a text, so configs, metrics and messages show its name. Levels compare by their order and only with each
other: `level >= Level.MODEL`. Code asks a level for its properties, never which one it is. This module imports neither
torch nor vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

COLDEST = 0.25
"""Limits are divided by the temperature, but not by less than this value. The reason is that sampling divides the
logits, and so their rounding errors, by the temperature. Measured mean |δ| with random weights: 1.8e-3 at temperature
1, 3.3e-3 at 0.5, 3.9e-3 at 0.3, 6.7e-3 at 0.1.
"""


@dataclass(frozen=True)
class Tolerance:
    """How far the log-probs of trainer and engine may be apart.

    mismatch   the largest mean |δ|, in nats per token
    per_token  what one more token of the responses adds to the limit, below `mismatch`; 0 where length has no effect
    start      the limit for responses of length 0, if `per_token` is not 0
    by_temperature  whether the limit is divided by the temperature of sampling
    noise      the largest |δ| before training, as a multiple of the model's own rounding noise
               (`qarl.metrics.mismatch_limit.times_noise`), if very many tokens are compared; None without such a limit
    """

    mismatch: float
    per_token: float = 0.0
    start: float = 0.0
    by_temperature: bool = True
    noise: float | None = None

    @property
    def has_noise_limit(self) -> bool:
        return self.noise is not None

    def mismatch_limit(
        self, response_length: float | None = None, temperature: float = 1.0
    ) -> float:
        """Return the largest mean |δ| of responses with `response_length` tokens on average; None means long ones."""
        limit = self.mismatch
        if self.per_token and response_length is not None:
            limit = min(self.start + self.per_token * response_length, limit)
        if not self.by_temperature:
            return limit
        return limit / min(max(temperature, COLDEST), 1.0)

    def noise_limit(self, tokens: float) -> float:
        """Return the largest multiple of the noise in a comparison of `tokens` tokens, or infinity without a limit.

        It is three standard errors over `noise`, for a standard deviation of a token's value that is as large as its
        mean."""
        if self.noise is None:
            return math.inf
        return self.noise * (1 + 3 / math.sqrt(tokens))


class Level(StrEnum):
    """How far the trainer's forward follows the engine."""

    OFF = "off"
    LINEARS = "linears"
    MODEL = "model"
    EXACT = "exact"

    @property
    def rank(self) -> int:
        """The number of levels below this one."""
        return list(Level).index(self)

    @property
    def tolerance(self) -> Tolerance:
        """How far the log-probs of trainer and engine may be apart at this level."""
        return _TOLERANCES[self]

    @property
    def low_bit(self) -> bool:
        """Whether the trainer's linears multiply by the published low-bit tensors."""
        return self >= Level.LINEARS

    @property
    def follows_engine(self) -> bool:
        """Whether the trainer rounds like the engine between the linears, too, and routes to the same experts."""
        return self >= Level.MODEL

    @property
    def zero_mismatch(self) -> bool:
        """Whether every operator is the engine's, so that δ is 0."""
        return self >= Level.EXACT

    def __lt__(self, other: object) -> bool:
        return self.rank < _rank(other)

    def __le__(self, other: object) -> bool:
        return self.rank <= _rank(other)

    def __gt__(self, other: object) -> bool:
        return self.rank > _rank(other)

    def __ge__(self, other: object) -> bool:
        return self.rank >= _rank(other)


def _rank(level: object) -> int:
    if not isinstance(level, Level):
        raise TypeError(f"a Level compares only with a Level, not with {level!r}")
    return level.rank


_OFF = Tolerance(mismatch=1.0, noise=1.2)
_LINEARS = Tolerance(mismatch=0.15, noise=1.2)
"""Ten (`off`) and seven times the mean |δ| of healthy runs with trained weights, which is 9e-2 and 2e-2. With random
weights it is at most 0.6 (Nemotron) and 1e-1 (mixtures of experts). As multiples of the noise, healthy runs have 0.5 to
0.9. At `off`, too, the forward that is compared with the noise multiplies by the published tensors."""
_MODEL = Tolerance(mismatch=1e-2, start=5e-3, per_token=5e-6, noise=0.4)
"""Where the trainer cannot call the engine's attention, δ comes from the order in which attention sums over keys, so it
grows with the length of the responses. Measured with attention in PyTorch, on CPUs:

    50 tokens      limit 5.3e-3; 0, or with AMX tiles 1e-4 (quickstart) to 1.8e-3 (random weights)
    1000 tokens    limit 1e-2, half of the smallest known mistake; at most 1.6e-3

As multiples of the noise, healthy runs have 0 with the engine's attention, and 0 to 0.1 with attention in PyTorch."""
_EXACT = Tolerance(mismatch=1e-4, by_temperature=False)
"""|δ| should be 0, but vLLM's attention on several threads, or the log-softmax of a different release, may cause 1e-6.
There is no noise, and this limit is stricter."""

_TOLERANCES = {
    Level.OFF: _OFF,
    Level.LINEARS: _LINEARS,
    Level.MODEL: _MODEL,
    Level.EXACT: _EXACT,
}
