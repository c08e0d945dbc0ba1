"""Kernels on CPUs: vLLM's operators, and PyTorch operators that give the same bits."""
