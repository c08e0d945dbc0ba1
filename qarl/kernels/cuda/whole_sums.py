"""Let cuBLAS multiply BF16 matrices without splitting their sums, so that a row does not depend on the number of rows.

cuBLAS chooses a kernel by the number of rows. Of what it may choose on capability 9.0 and 10.0, only a split of the sum
over K changes the bits of a row, says vLLM (vllm/model_executor/layers/batch_invariant.py), and a kernel with splits
needs a workspace that it does not get here. This is the part of vLLM's recipe that concerns linears. Its other part,
VLLM_BATCH_INVARIANT, replaces operators that the trainer needs for gradients.

It is off by default: small products of few rows take longer, and no GPU has shown where cuBLAS splits, nor that this
prevents it. `quant.align=exact` asks for it in all processes of a run. The variables must be set before CUDA starts.
Nothing here imports torch before it is called.
"""

from __future__ import annotations

import os

VARIABLES = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
"""The smallest workspaces: 1 KiB for cuBLASLt, and 8 buffers of 16 KiB for cuBLAS."""


def variables(*, asked: bool) -> dict[str, str]:
    """Return what a run on GPUs sets in the environment of each process. `asked`: whether its level promises δ = 0."""
    return dict(VARIABLES) if asked else {}


def set_variables(*, asked: bool) -> None:
    """Set them in this process, except for those that the user has set. Call this before CUDA starts."""
    for name, value in variables(asked=asked).items():
        os.environ.setdefault(name, value)


def are_set() -> bool:
    return all(os.environ.get(name) == value for name, value in VARIABLES.items())


def apply() -> None:
    """If the variables are set, tell PyTorch: it multiplies by cuBLASLt, and allows cuBLAS no split."""
    if not are_set():
        return
    import torch

    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
