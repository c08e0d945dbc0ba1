"""From measured (or, for GPUs that are elsewhere, assumed) ceilings to the time of a training step; see
docs/cost_model.md."""
