"""Low-bit kernels in Triton, for Triton 3.6 and later, each beside the PyTorch function that it must equal.

A kernel file holds `@triton.jit` functions and the wrappers that check shapes and launch them.
`scripts/triton_kernels.py` lists with which types and configurations each is launched, for compilation without a GPU.
`_compat.py` hides where Triton's interpreter computes otherwise than a GPU.
"""
