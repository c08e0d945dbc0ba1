"""What a decode step of vLLM takes beside its products and its KV cache: kernels, all-reduces, sampler and host.

Nobody has measured these numbers with QaRL. They are estimates for an H100 and vLLM 0.24 with CUDA graphs. They decide
the time of a token when few responses are left: a mixture of 30B on two GPUs reads its weights in less than 1 ms.
"""

from __future__ import annotations

from typing import NamedTuple

from qarl.checks.model_size import ModelSize

GRAPH_KERNEL_SECONDS = 3e-6
"""Time of a small kernel in a CUDA graph, with the gap to the next one (estimate)."""
LAYER_KERNELS, EXPERTS_KERNELS, UNCOMPILED_KERNELS = 10, 8, 8
"""Kernels of a layer in a decode step that a roofline of products does not contain (estimates). In order: norms, rotary
embedding, writes to the cache, attention and its reduction; routing and what lies between the experts' products; what
vLLM's compiler would have fused. 8-bit engines are not compiled (`qarl.rollout.gpu_sharing.graph_arguments`)."""
UNCOMPILED = ("w8a8", "fp8")
ALL_REDUCE_SECONDS = 12e-6
"""Latency of an all-reduce between the GPUs of an engine; each layer has two (estimate)."""
SAMPLER_KERNELS, SAMPLER_PASSES = 25, 8
"""Kernels of the sampler, which are launched one by one, and its passes over FP32 logits (estimates)."""
ENGINE_SECONDS = 8e-3
"""The least time of a decode step, because the host needs as long: scheduler, inputs, messages between processes
(estimate). vLLM schedules a step while the device computes the former one, so only the longer time counts."""


class DecodeStep(NamedTuple):
    """Seconds of one decode step beside products and cache."""

    small_kernels: float
    all_reduce: float
    sampler: float


def decode_step(
    size: ModelSize, scheme: str, rows: float, tensor_parallel: int, *, memory: float, link: float, launch: float
) -> DecodeStep:
    """Return the seconds for `rows` sequences. `memory` and `link` are in bytes/s, `launch` in seconds."""
    kernels = LAYER_KERNELS + EXPERTS_KERNELS * bool(size.experts) + UNCOMPILED_KERNELS * (scheme in UNCOMPILED)
    reduced = 2 * size.layers * (ALL_REDUCE_SECONDS + 2 * 2 * rows * size.hidden / link)
    return DecodeStep(
        small_kernels=size.layers * kernels * GRAPH_KERNEL_SECONDS,
        all_reduce=reduced if tensor_parallel > 1 else 0.0,
        sampler=SAMPLER_KERNELS * launch + SAMPLER_PASSES * 4 * rows * size.vocab / memory,
    )
