"""`qarl eval`: score a run, or an exported model, in the rollout engine, beside another model if asked."""
