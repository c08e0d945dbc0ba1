"""Which alignment level applies to a model: the level that was asked for, or the highest below it that exists there.

Levels `model` and `exact` exist for the families of `qarl.families.aligned` against vLLM on CPU. On a GPU, `model`
exists for dense models, and for some kernels of experts (`qarl.align.cuda`). Other models and devices get the next
lower level, with the reasons. On a CPU `model` is `exact` wherever the engine's attention can be called.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from qarl.align.cuda import unavailable_on_cuda, unconfirmed_on_cuda
from qarl.align.rotary import head_size_of, is_plain, match_rotary
from qarl.config.level import Level
from qarl.families import ALIGNED, family_of
from qarl.kernels.base import Kernel
from qarl.kernels.cpu import layer_ops
from qarl.process import vllm_unusable, vllm_without_device

EXACT_DEVICES = ("cpu",)
"""Where level `exact` exists. On a GPU the log-softmax of trainer and engine may differ in the last bit of FP32."""


@dataclass(frozen=True)
class AppliedLevel:
    """The `level` that applies where `asked` was asked for, and the reasons if it is lower (`why_lower`)."""

    asked: Level
    level: Level
    why_lower: tuple[str, ...] = ()


def resolve_level(
    config: Any,
    asked: Level,
    *,
    device_type: str,
    kernels: Collection[type[Kernel]],
    dtype: torch.dtype = torch.bfloat16,
    workers: int = 1,
    capability: tuple[int, int] | None = None,
) -> AppliedLevel:
    """Return the level that applies to this transformers config, and the reasons if it is lower than `asked`.

    `exact` applies instead of `model` wherever it exists.

    `kernels`: those of the model's quantized linears and experts. `workers`: number of workers that one engine is
    split over. `capability`: compute capability of the GPU. Default: that of this process's GPU, if it has one.
    """
    if not asked.follows_engine:
        return AppliedLevel(asked, asked)
    split = split_unavailable(workers)
    if device_type == "cuda" and torch.cuda.is_available():
        capability = capability or torch.cuda.get_device_capability()
    not_exact = exact_unavailable(config, device_type, dtype, kernels, capability) or split
    if not_exact is None:
        return AppliedLevel(asked, Level.EXACT)
    reasons = [f"{asked}: {not_exact}"] if asked.zero_mismatch else []
    not_model = model_unavailable(config, device_type, dtype, capability, kernels) or split
    if not_model is None:
        return AppliedLevel(asked, Level.MODEL, tuple(reasons))
    reasons.append(f"{Level.MODEL}: {not_model}")
    return AppliedLevel(asked, Level.LINEARS, tuple(reasons))


def unconfirmed(
    level: Level, device_type: str, config: Any, *, eager: bool, adapters: bool = False
) -> str | None:
    """Return why an applied level promises no mismatch for this transformers config, or None.

    `eager`: whether the engine runs without CUDA graphs. `adapters`: whether it has adapters.
    """
    if device_type != "cuda" or not level.follows_engine:
        return None
    return unconfirmed_on_cuda(config, eager=eager, adapters=adapters)


def split_unavailable(workers: int) -> str | None:
    """Return why levels above `linears` are not available for an engine of several workers, or None for one worker."""
    if workers == 1:
        return None
    return (
        f"rollout.tensor_model_parallel_size={workers}: each worker of the engine rounds its part of o_proj and "
        "down_proj before the parts are added, but the trainer multiplies whole rows"
    )


def model_unavailable(
    config: Any,
    device_type: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
    kernels: Collection[type[Kernel]] = (),
) -> str | None:
    """Return why level `model` cannot be used for this config, device and dtype, or None if it can."""
    if device_type not in ("cpu", "cuda"):
        return f"is built for cpu and cuda, not for {device_type}"
    if dtype != torch.bfloat16:
        return f"is built for BF16 weights, not for {dtype}"
    family = family_of(config)
    if not family.aligned:
        return f"is built for {', '.join(ALIGNED)}, not for {config.model_type}"
    if device_type not in family.layers:
        return f"is built for {family.name} on {', '.join(family.layers)}, not on {device_type}"
    if why_not := rotary_unavailable(config, device_type):
        return why_not
    if config.hidden_act not in family.activations:
        return f"is built for hidden_act {', '.join(family.activations)}, not {config.hidden_act}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "is built for full attention, not for sliding windows"
    return unavailable_on_cuda(config, capability, kernels) if device_type == "cuda" else None


def rotary_unavailable(config: Any, device_type: str = "cpu") -> str | None:
    """Return why the trainer's rotary embedding cannot equal the engine's bit for bit, or None if it can."""
    if is_plain(config):
        return None
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    launches_elsewhere = device_type == "cuda" and vllm_without_device() is not None
    if launches_elsewhere:  # the trainer, on another machine, decides
        return None
    if missing := vllm_unusable():
        return (
            f"needs vLLM's cosines and sines for a rotary embedding of type {rope_type}: {missing}"
        )
    try:
        match = match_rotary(config)
    except Exception as error:  # `check_config_keys` refuses such a config, but the level may be resolved before that
        return f"does not support a rotary embedding of type {rope_type}: {type(error).__name__}: {error}"
    return None if match.equal else f"does not reproduce vLLM's {match.engine}"


def exact_unavailable(
    config: Any,
    device_type: str,
    dtype: torch.dtype,
    kernels: Collection[type[Kernel]],
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return why level `exact` cannot be used for this config, device and dtype, or None if it can."""
    if why_not := model_unavailable(config, device_type, dtype, capability, kernels):
        return why_not
    if device_type not in EXACT_DEVICES:
        return (
            f"is built for {', '.join(EXACT_DEVICES)}, not for {device_type}, where it only asks cuBLAS not to split "
            "the sums of BF16 products, which no GPU has confirmed"
        )
    if any(kernel.reference for kernel in kernels):
        return "some linears or experts run the reference kernel, not the engine's"
    if os.environ.get("VLLM_CPU_ATTN_SPLIT_KV", "0") != "0":
        return (
            "VLLM_CPU_ATTN_SPLIT_KV is set, so the result of vLLM's attention depends on the batch"
        )
    return layer_ops.attention_unavailable(device_type, head_size_of(config))
