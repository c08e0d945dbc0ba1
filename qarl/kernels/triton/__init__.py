"""Low-bit kernels in Triton, for Triton 3.6 and later. Tests compare each with a PyTorch function.

A kernel file has `@triton.jit` functions, and wrappers that check shapes and launch them. Types and configurations of
each launch are in `benchmarks/proofs/triton_kernels.py`, for compilation without a GPU. `numbers.py` hides the
differences between Triton's interpreter and a GPU.
"""
