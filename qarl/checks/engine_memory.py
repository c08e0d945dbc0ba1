"""The term of the memory estimate for the rollout engine (`qarl.checks.memory`).

Awake: vLLM's share of the GPU. Asleep (on GPUs): an allowance. With adapters on a CPU, what the local trainer cannot
share, and A for each token (6 bytes a number), or at the start a second base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl.checks.memory_parts import (
    GIB,
    PHASES,
    Part,
    adapted_linears,
    adapter_parameters,
    published,
    quantized_linears,
    scheme_of,
)
from qarl.checks.model_size import ModelSize, Shape
from qarl.config.lora import engine_rank
from qarl.config.schema import BATCHED_TOKENS

if TYPE_CHECKING:
    from qarl.config import Config
    from qarl.schemes import Scheme
    from qarl.schemes.kernel_choice import KernelChoice

ENGINE_WORKSPACE_BYTES = GIB
"""A rough allowance for vLLM's forward, in addition to weights and KV cache."""
ENGINE_ASLEEP_BYTES = 2 * GIB
"""A rough allowance for what a sleeping engine keeps on its GPU: CUDA context, graphs, workspaces of libraries."""
ENGINE_GROUP_BYTES = GIB
"""A rough allowance for what it keeps in addition if its model is split over GPUs: buffers of NCCL and of vLLM's own
all-reduce, and the graphs' copies of them."""


def not_shared(size: ModelSize, config: Config) -> int:
    """Return the bytes of the base that an engine on a CPU has in addition to those of the trainer of adapters: layers
    that vLLM packs (`qarl.rollout.publish.cpu_layers`)."""
    scheme = scheme_of(config)
    quantized = quantized_linears(size, config)
    own_layouts = not config.quant.kernels.by_engine
    packed = 2 * sum(n * k for name, (n, k) in size.linears().items() if name not in quantized)
    for name, shape in quantized.items():
        if ".experts." in name and scheme.experts_repacked_on_cpus:
            packed += repacked_expert(scheme, config.quant.kernels, shape)
        elif scheme.repacked_on_cpus or own_layouts:
            packed += scheme.wire_bytes(*shape)
    return packed


def repacked_expert(scheme: Scheme, kernels: KernelChoice, shape: Shape) -> int:
    """Return the bytes of an expert's matrix as an engine on a CPU holds it."""
    from qarl.kernels.registry import presumed_experts_kernel

    kernel = presumed_experts_kernel(scheme.operands, kernels, "cpu")
    return 0 if kernel is None else kernel.prepared_bytes(scheme, shape)


def own_layout(size: ModelSize, config: Config) -> int:
    """Return how many more bytes than the published tensors the engine holds because of `quant.kernels`."""
    if config.quant.kernels.by_engine:  # nothing here needs torch then
        return 0
    from qarl.kernels.registry import own_kernel

    scheme = scheme_of(config)
    kernel = own_kernel(config.quant.kernels, scheme.operands)
    if kernel is None:
        return 0
    more = 0
    for shape in quantized_linears(size, config).values():
        prepared = kernel.prepared_bytes(scheme, shape)
        if prepared:
            more += prepared - scheme.wire_bytes(*shape)
    return more


def gathered_adapters(size: ModelSize, config: Config) -> int:
    """Return the bytes that vLLM takes on a CPU to multiply a batch of prompts by one adapter.

    It gathers A for each token in BF16 and casts it to FP32, then it gathers B (`bgmv_shrink` and `bgmv_expand_slice`
    in vllm/lora/ops/torch_ops/lora_ops.py)."""
    data = config.data
    rollout = config.rollout
    longest = data.max_prompt_length + data.max_response_length
    tokens = max(rollout.max_num_batched_tokens or BATCHED_TOKENS[config.backend], longest)
    each = max((max(6 * k, 2 * n) for n, k in adapted_linears(size, config)), default=0)
    return tokens * (engine_rank(config.lora.r) if config.lora.r else 0) * each


def engine(
    size: ModelSize, config: Config, device: str, gpu_memory_bytes: int
) -> tuple[list[Part], int]:
    """Return, for one GPU, the engine's parts of the memory and the bytes of its KV cache. An engine on GPUs of its own
    (`trainer.staleness`) has no part of the trainer's, and never sleeps."""
    parallel = config.rollout.tensor_model_parallel_size
    shares = config.lora.r and config.backend == "local" and device == "cpu"
    gathered = gathered_adapters(size, config) if device == "cpu" else 0
    every = published(size, config) // parallel
    weights = not_shared(size, config) if shares else every
    twice = (
        every - weights
    )  # nothing is gathered before the first publish, after which the trainer shares these
    weights += own_layout(size, config) + 2 * adapter_parameters(size, config)
    if device == "cpu":  # vLLM packs embed_tokens and lm_head, and keeps the originals
        weights += 2 * size.embedding_parameters
    sleeps = config.rollout.free_cache_engine and device == "cuda"
    phases = ("rollout",) if sleeps else PHASES
    if device == "cuda":
        budget = int(config.rollout.gpu_memory_utilization * gpu_memory_bytes)
        kv_cache = budget - weights - ENGINE_WORKSPACE_BYTES
    else:
        kv_cache = int(config.rollout.cpu_kvcache_space_gib * GIB)
    asleep = ENGINE_ASLEEP_BYTES + ENGINE_GROUP_BYTES * (parallel > 1)
    parts = [
        Part("vLLM: weights", weights, phases),
        Part("vLLM: KV cache", max(kv_cache, 0), phases),
        Part("vLLM: workspace (allowance)", ENGINE_WORKSPACE_BYTES, phases),
        Part("vLLM: A and B, gathered", gathered, ("rollout",)),
        Part("vLLM: second copy of the base, at the start", max(twice - gathered, 0), ("rollout",)),
        Part("vLLM asleep (allowance)", asleep if sleeps else 0, PHASES[1:]),
    ]
    own_gpu = device == "cuda" and config.trainer.staleness
    return [] if own_gpu else parts, kv_cache
