"""What the memory estimate (`qarl.checks.memory`) adds up, and the counts that several of its terms share.

The terms are in three modules, one function for each: `weight_memory` (masters, moments, low-bit tensors),
`activation_memory` (what one micro-batch leaves for its backward) and `engine_memory` (vLLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl.checks.model_size import ModelSize, Shape
from qarl.config.ignored_layers import is_ignored
from qarl.config.lora import is_target
from qarl.schemes import Scheme, get_scheme

if TYPE_CHECKING:
    from qarl.config import Config

GIB = 2**30
PHASES = ("rollout", "old_log_prob", "update", "step")
"""`update` is the forward and backward of a micro-batch. `step` is the optimizer's step."""


@dataclass(frozen=True)
class Part:
    """A part of the memory: `name` takes `bytes` on one GPU during `phases`."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES


def ranks(config: Config) -> int:
    """Return the number of trainer processes. FSDP2 shards over them."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def adapted_linears(size: ModelSize, config: Config) -> list[Shape]:
    """Return [N, K] of the linears with an adapter."""
    if not config.lora.r:
        return []
    linears = size.linears()
    targets = config.lora.target_modules
    of_experts = {name.rpartition(".")[2] for name in linears if ".experts." in name}
    return [
        shape
        for name, shape in linears.items()
        if name.rpartition(".")[2] not in of_experts and is_target(name, targets)
    ]


def adapter_parameters(size: ModelSize, config: Config) -> int:
    """Return the number of weights in the adapters, or 0 if all weights of the model are trained."""
    return (config.lora.r or 0) * sum(n + k for n, k in adapted_linears(size, config))


def bf16_weights(size: ModelSize, config: Config) -> int:
    """Return the number of BF16 weights of the local trainer, or with adapters of either trainer, which has freed the
    quantized weights."""
    trained = adapter_parameters(size, config)
    quantized = quantized_linears(size, config).values() if trained else ()
    return size.parameters + trained - sum(n * k for n, k in quantized)


def scheme_of(config: Config) -> Scheme:
    return get_scheme(config.quant.scheme, config.quant.group_size)


def quantized_linears(size: ModelSize, config: Config) -> Mapping[str, Shape]:
    if not scheme_of(config).quantized:
        return {}
    return {
        name: shape
        for name, shape in size.linears().items()
        if not is_ignored(name, config.quant.ignore)
    }


def published(size: ModelSize, config: Config) -> int:
    """Return the number of published bytes. Quantized layers are low-bit tensors, and everything else is BF16."""
    scheme = scheme_of(config)
    quantized = quantized_linears(size, config).values()
    low_bit = sum(scheme.wire_bytes(*shape) for shape in quantized)
    return low_bit + 2 * (size.parameters - sum(n * k for n, k in quantized))


def micro_batch_tokens(config: Config, *, log_probs: bool = False) -> int:
    """Return the largest number of tokens in a micro-batch of the update, or of the pass for old log-probs."""
    actor = config.actor
    data = config.data
    if actor.use_dynamic_bsz:
        limit = actor.ppo_max_token_len_per_gpu or 0
        return (actor.log_prob_max_token_len_per_gpu or limit) if log_probs else limit
    size = (
        actor.log_prob_micro_batch_size_per_gpu if log_probs else actor.ppo_micro_batch_size_per_gpu
    )
    return (size or 0) * (data.max_prompt_length + data.max_response_length)
