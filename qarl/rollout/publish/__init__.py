"""How new weights reach vLLM: they are checked, sent, verified and written into the engine's own tensors."""
