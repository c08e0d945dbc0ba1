"""Kernels on NVIDIA GPUs: vLLM's own operators."""
