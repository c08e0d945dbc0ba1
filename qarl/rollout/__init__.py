"""vLLM as the rollout engine, and what must hold before it gets new weights."""
