"""Kernels on CPUs: vLLM's own operators, and PyTorch's with the same bits."""
