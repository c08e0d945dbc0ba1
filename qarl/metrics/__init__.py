"""Measurements of a run: mismatch, seconds per phase, metrics.jsonl, versions, plots."""

from __future__ import annotations

from qarl.lazy import exporter

__getattr__ = exporter(
    __name__,
    {
        "step_metrics": ("PhaseTimer", "mismatch_metrics", "response_metrics"),
        "tracker": ("Tracker", "read_metrics"),
    },
)
