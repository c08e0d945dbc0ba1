"""The limit on a run's mismatch (`qarl.metrics.mismatch_limit`), as each step asks it.

Before the first update a mismatch over the limit ends the run, and later it is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from qarl.config.level import Level
from qarl.metrics.mismatch_limit import check_mismatch


@dataclass(frozen=True)
class StepLimit:
    """A run's limit.

    limit   `quant.mismatch_limit`, or None for that of the level
    level   the level whose limit applies
    source  words that say where the limit comes from, or None for those of the level or the key
    """

    limit: float | None
    level: Level
    source: str | None = None

    def check(
        self,
        abs_mean: float,
        *,
        response_length: float,
        temperature: float,
        before_first_update: bool,
    ) -> str | None:
        """Return a warning if `abs_mean`, the mean |δ| per token, is over the limit, and otherwise None.

        Raise MismatchError instead of a warning `before_first_update`. `response_length`: mean tokens per response.
        `temperature`: that of sampling."""
        return check_mismatch(
            abs_mean,
            limit=self.limit,
            level=self.level,
            before_first_update=before_first_update,
            response_length=response_length,
            source=self.source,
            temperature=temperature,
        )
