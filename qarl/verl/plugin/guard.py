"""The mismatch guard of an actor in verl, as `qarl.metrics.guard` defines it.

There is no probe before training: verl gives a trainer no way to generate outside of a step. The first mini-batch is
the first batch of which both sides' log-probs are known, and the guard looks at it before its update. A run that is
refused has trained nothing, and has lost one generation.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from qarl.metrics.guard import DEFAULT_LIMITS, check_mismatch
from qarl.verl.plugin.config import QuantSettings

UNQUANTIZED = "linears"
"""The level whose limit an actor without `fsdp_config.quant` has: both sides multiply by the same BF16 weights."""
_SOURCE = "that an actor without quant.mismatch_limit may show (+qarl=bf16 has that key)"

_log = logging.getLogger("qarl.verl.plugin")


def temperature_of(data: Any) -> float:
    """The lowest temperature of a batch of verl's: a number for all rows, or a tensor with one a row."""
    value = data.get("temperature", 1.0)
    value = value if isinstance(value, torch.Tensor) else getattr(value, "data", value)
    return float(value.min()) if isinstance(value, torch.Tensor) else float(value)


def mismatch_is_over(
    quant: QuantSettings | None,
    level: str,
    abs_mean: float,
    *,
    length: float,
    temperature: float,
    before_first_update: bool,
) -> bool:
    """Whether a mean |δ| is over its limit; that is also logged as a warning.

    Args:
        quant: the actor's settings, or None for an actor without.
        level: the alignment level that is applied.
        abs_mean: of all tokens of a mini-batch or a step, over all ranks.
        length: tokens of a response on average.
        temperature: that the responses were sampled at.

    Raises:
        MismatchError: it is over the limit and `before_first_update`.
    """
    warning = check_mismatch(
        abs_mean,
        limit=DEFAULT_LIMITS[UNQUANTIZED] if quant is None else quant.mismatch_limit,
        level=level,
        before_first_update=before_first_update,
        response_length=length,
        temperature=temperature,
        source=_SOURCE if quant is None else None,
    )
    if warning is not None:
        _log.warning(warning)
    return warning is not None
