"""Measurements of a run: mismatch, seconds per phase, metrics.jsonl, versions, plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl.lazy import exporter

if TYPE_CHECKING:
    from qarl.metrics.mismatch import PhaseTimer, mismatch_metrics, response_metrics
    from qarl.metrics.tracker import Tracker, read_metrics

__all__ = ["PhaseTimer", "Tracker", "mismatch_metrics", "read_metrics", "response_metrics"]

__getattr__ = exporter(
    __name__,
    {
        "mismatch": ("PhaseTimer", "mismatch_metrics", "response_metrics"),
        "tracker": ("Tracker", "read_metrics"),
    },
)
