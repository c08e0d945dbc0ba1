"""Measurements of a run: mismatch, seconds per phase, metrics.jsonl, versions, plots."""
