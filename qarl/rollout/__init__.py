"""vLLM as the rollout engine; `publish/` sends it new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl.lazy import exporter

if TYPE_CHECKING:
    from qarl.rollout.engine import (
        EngineConfig,
        EngineFailed,
        RolloutEngine,
        SamplingConfig,
    )
    from qarl.rollout.requests import RolloutBatch

__all__ = ["EngineConfig", "EngineFailed", "RolloutBatch", "RolloutEngine", "SamplingConfig"]

__getattr__ = exporter(
    __name__,
    {
        "engine": ["EngineConfig", "EngineFailed", "RolloutEngine", "SamplingConfig"],
        "requests": ["RolloutBatch"],
    },
)
