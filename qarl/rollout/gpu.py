"""On a GPU: what vLLM does to the process and the memory that it shares with the trainer (backend `local`, TRL).

Batch invariance. With VLLM_BATCH_INVARIANT=1 vLLM (0.24 and 0.29, `enable_batch_invariant_mode`) replaces softmax,
log_softmax, mean and bmm by its own operators for every CUDA tensor of the process, and on capability 8.0 also all
matrix products. Its operators have no backward. The trainer would run them too, and lose gradients.
"""

from __future__ import annotations

import os

import torch

from qarl.errors import UserError

_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def check_not_batch_invariant() -> None:
    """Raise UserError if vLLM would replace operators of the trainer, which is in the same process, on a GPU."""
    if os.environ.get(_BATCH_INVARIANT, "0").strip() in ("", "0") or not torch.cuda.is_available():
        return
    raise UserError(
        "vLLM's batch-invariant mode cannot be used in the trainer's process",
        where=f"environment variable {_BATCH_INVARIANT}={os.environ[_BATCH_INVARIANT]}",
        why="vLLM would replace torch.bmm and softmax in the whole process by operators without a backward, so the "
        "trainer's gradients would be wrong",
        fix=f"unset {_BATCH_INVARIANT}, or set backend=verl, whose engines are processes of their own",
    )
