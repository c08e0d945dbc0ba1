"""The numbers that `qarl bench plan` assumes, estimates or was given by a count, each with its name.

Nobody has measured the estimates with QaRL: they are for an H100 and vLLM with CUDA graphs. They decide the time
of a token when few responses are left. A scheme's own numbers are `qarl.schemes.plan_terms`.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.8
"""Assumed share of the data sheet's rate of memory."""
LINK = 0.8
"""Assumed share of the data sheet's rates of links."""
ADAMW_BYTES = 38
"""Bytes that an AdamW step moves per parameter: FP32 gradient, moments and master, BF16 weight."""
PUBLISH_PASSES = 4
"""Passes over the published bytes."""
GPUS_PER_NODE = 8
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class BlockBytes:
    """Bytes that a layer's norms, rotary embedding, residuals and SwiGLU move, in a forward or a backward: for each
    token and hidden element, element of queries and keys, head, element of a head, and element of a dense MLP."""

    hidden: int
    queries_and_keys: int
    head: int
    head_element: int
    mlp: int


FORWARD = BlockBytes(hidden=84, queries_and_keys=20, head=0, head_element=8, mlp=10)
BACKWARD = BlockBytes(hidden=204, queries_and_keys=28, head=0, head_element=8, mlp=18)
NORMED_FORWARD = BlockBytes(hidden=84, queries_and_keys=56, head=24, head_element=8, mlp=10)
"""The same if queries and keys are normed."""
NORMED_BACKWARD = BlockBytes(hidden=204, queries_and_keys=120, head=40, head_element=8, mlp=18)

MUON_ELEMENT_BYTES = 138
"""Bytes that Muon moves for each element of a matrix of n x m in FP32, n <= m (counted)."""
MUON_SQUARE_BYTES = 120
"""Bytes that Muon moves for each element of n x n (counted)."""
LOGIT_FORWARD_BYTES = 24
"""Bytes that log-probs and entropy move per logit beyond the product, in a forward (estimate)."""
LOGIT_BACKWARD_BYTES = 40
"""The same in a backward (estimate)."""

GRAPH_KERNEL_SECONDS = 3e-6
"""Time of a small kernel in a CUDA graph, with the gap to the next one (estimate)."""
LAYER_KERNELS = 10
"""Kernels of a layer in a decode step that a roofline of products does not contain: norms, rotary embedding, writes to
the cache, attention and its reduction (estimate)."""
EXPERTS_KERNELS = 8
"""The same of a layer of experts in addition: routing, and what lies between the experts' products (estimate)."""
UNCOMPILED_KERNELS = 8
"""What vLLM's compiler would have fused in a layer (estimate)."""
ALL_REDUCE_SECONDS = 12e-6
"""Latency of an all-reduce between the GPUs of an engine; each layer has two (estimate)."""
SAMPLER_SECONDS = 125e-6
"""Time to launch the sampler's 25 kernels one by one (estimate)."""
SAMPLER_PASSES = 8
"""Passes of the sampler over FP32 logits (estimate)."""
ENGINE_SECONDS = 8e-3
"""The least time of a decode step, because the host needs as long: scheduler, inputs, messages between processes
(estimate). vLLM schedules a step while the device computes the former one, so only the longer time counts."""
