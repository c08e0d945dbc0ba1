"""Applies the mismatch guard of `qarl.metrics.mismatch_limit` to an actor in verl.

verl generates only inside a training step, so the guard cannot run before training starts. It checks the first
mini-batch, before the first update. If it refuses the run, one generation is lost, but nothing has been trained.
"""

from __future__ import annotations

from typing import Any

import torch

UNQUANTIZED = "linears"
"""An actor without `fsdp_config.quant` gets the limit of this level, because both sides use the same BF16 weights."""
SOURCE = "that is allowed by default (+qarl=bf16 adds the key quant.mismatch_limit, which sets the limit)"


def temperature_of(data: Any) -> float:
    """Return the lowest temperature of a verl batch. verl gives a number for all rows or a tensor with one per row."""
    value = data.get("temperature", 1.0)
    value = value if isinstance(value, torch.Tensor) else getattr(value, "data", value)
    return float(value.min()) if isinstance(value, torch.Tensor) else float(value)
