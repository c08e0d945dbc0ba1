"""On a GPU: what vLLM does to the process and the memory that it shares with the trainer (backend `local`, TRL).

Batch invariance. With VLLM_BATCH_INVARIANT=1 vLLM (0.24 and 0.29, `enable_batch_invariant_mode`) replaces softmax,
log_softmax, mean and bmm by its own operators for every CUDA tensor of the process, and on capability 8.0 also all
matrix products. Its operators have no backward. The trainer would run them too, and lose gradients.

Memory. While the trainer works, the engine sleeps (vLLM's sleep level 1): its weights are in host memory, and its KV
cache is freed. Level 2 would also discard the kernels' workspaces, which no publish writes. vLLM starts after the
trainer has loaded its weights, and refuses to start if less than its share of the GPU is free. Otherwise a share that
is too large would end the run later, when the engine wakes up for the first time.

CUDA graphs. vLLM's default is to compile the model too. Compiled models round differently from vLLM's own operators,
which the trainer follows at level `model`, and whose 8-bit activations it follows at every level. There only decode
steps are captured, and nothing is compiled. W4A16 and BF16 below `model` follow no operator around the linears, so
vLLM's default stays.
"""

from __future__ import annotations

import gc
import math
import os
import traceback
from typing import Any

import torch

from qarl.errors import UserError
from qarl.kernels.cuda.layer_ops import ENGINE_ARGUMENTS
from qarl.quant.scheme import Scheme

GRAPHS: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
"""vLLM's arguments for CUDA graphs of decode steps without compilation (mode 0). Both vLLM 0.24 and 0.29 have them."""


def graph_arguments(scheme: Scheme, *, aligned: bool, kernels: str = "engine") -> dict[str, Any]:
    """Return vLLM's arguments for CUDA graphs. `aligned`: whether the trainer follows the engine's operators (levels
    `model` and `exact`). `kernels`: a value of `quant.kernels`; the compiler does not know QaRL's own."""
    if aligned:
        return ENGINE_ARGUMENTS
    return GRAPHS if scheme.input_activations is not None or kernels != "engine" else {}


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


def eager(enforce_eager: bool | None) -> bool:
    """Return whether vLLM runs without CUDA graphs and compilation. The default (None) is true only without a GPU."""
    return not torch.cuda.is_available() if enforce_eager is None else enforce_eager


def release_unused_memory() -> None:
    """Return the memory that PyTorch reserves but does not use to the driver. vLLM wakes up with `cuMemCreate`, which
    cannot use reserved memory. vLLM 0.24 does not empty PyTorch's cache first, 0.29 does."""
    gc.collect()
    torch.cuda.empty_cache()


def drop_frames(error: BaseException | None) -> None:
    """Clear the local variables of the functions that raised `error` and its causes. Otherwise they keep the tensors of
    a lost engine, and vLLM's sleep mode refuses to start another engine in this process."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def check_free_memory(share: float) -> None:
    """Raise UserError if vLLM's share of the GPU is not free. (vLLM would raise a ValueError that does not know the
    trainer.) PyTorch's unused memory is returned to the driver first."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free >= math.ceil(share * total):
        return
    largest = math.floor(100 * free / total) / 100
    raise UserError(
        f"vLLM needs {share * total / 2**30:.1f} GiB of the GPU, but only {free / 2**30:.1f} GiB are free",
        where=f"rollout.gpu_memory_utilization={share:g}",
        why=f"the trainer holds {torch.cuda.memory_allocated() / 2**30:.1f} GiB of {total / 2**30:.1f} GiB; the rest "
        "belongs to CUDA or to other processes",
        fix=f"set rollout.gpu_memory_utilization={largest:g} or less (the optimizer's state also needs room), or use a "
        "larger GPU",
    )
