"""Low-bit kernels in Triton, for Triton 3.6 and later, each beside the PyTorch function that it must equal.

A kernel file holds `@triton.jit` functions, the wrappers that check shapes and launch them, and one list `AOT` that
says with which types and configurations each kernel ships (`_aot.py`). `_compat.py` hides where Triton's interpreter
computes otherwise than a GPU.
"""
