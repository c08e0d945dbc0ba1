"""Applies the mismatch guard of `qarl.metrics.guard` to an actor in verl.

There is no probe before training, because verl lets a trainer generate only inside a step. The first mini-batch is the
first data with log-probs from both trainer and engine, and the guard checks it before its update. If the guard refuses
the run, one generation is lost and nothing has been trained.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from qarl.metrics.guard import DEFAULT_LIMITS, check_mismatch
from qarl.verl.plugin.config import QuantSettings

UNQUANTIZED = "linears"
"""The level whose limit applies to an actor without `fsdp_config.quant`: both sides use the same BF16 weights."""
_SOURCE = "that an actor without quant.mismatch_limit may show (+qarl=bf16 has that key)"

_log = logging.getLogger("qarl.verl.plugin")


def temperature_of(data: Any) -> float:
    """Return the lowest temperature of a verl batch, which has one number for all rows or a tensor with one per row."""
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
    """Return whether a mean |δ| is over its limit; if so, log a warning.

    Args:
        quant: the actor's quantization settings, or None if it has none.
        level: the alignment level that is applied.
        abs_mean: mean |δ| over all tokens of a mini-batch or a step, over all ranks.
        length: mean tokens per response.
        temperature: the sampling temperature of the responses.
        before_first_update: no weight has been updated yet.

    Raises:
        MismatchError: the mean is over the limit and `before_first_update` is true.
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
