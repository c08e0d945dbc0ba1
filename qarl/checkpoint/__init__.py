"""Checkpoints and exports of a run. A folder appears on disk only when it is complete."""
