"""The way of new weights into vLLM: checked, sent, verified, written into the engine's own tensors."""
