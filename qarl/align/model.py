"""`quant.align`: how far the trainer's forward follows the rollout engine's arithmetic.

    off       plain BF16: the quantized-rollout baseline
    linears   low-bit GEMMs on the published tensors (`qarl.quant.convert.quantize_model`)
    model     and residual additions, norms, rotary embedding and attention with the engine's rounding, in PyTorch;
              cosines and sines of the rarer rotary types are the engine's own
    exact     and attention through the engine's own operator: δ is 0 (for prompts of more than some 300 tokens, on
              one thread, if the engine prefills each in one piece: see `qarl.kernels.cpu.attention`)

`align_model` applies the last two, once the linears are quantized. They are built for Llama, Qwen2, Qwen3 and Qwen3-MoE
against vLLM on CPU; of a mixture of experts both also take the engine's router and, if they are BF16, its operator for
experts. Elsewhere the level falls back to the next lower one that is built, and the report says why. What
remains at level `model` is the order of attention's FP32 sums. Up to 192 keys it was the engine's own order too on
a CPU without AMX, and δ 0; beyond, and with AMX, whose tiles sum even and odd neighbours apart, from the first keys on,
about one output in 10,000 of each attention is off by a BF16 step.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from qarl.align.attention import ENGINE_ATTENTION, FP32_ATTENTION, register_attention
from qarl.align.blocks import AlignedDecoderLayer, AlignedRMSNorm, align_module
from qarl.align.config_keys import ENGINE_ACTIVATIONS, check_config_keys
from qarl.align.families import FAMILIES
from qarl.align.rotary import EngineRotaryEmbedding, is_plain, match_rotary
from qarl.align.routing import AlignedRouter, routers
from qarl.errors import UserError
from qarl.kernels.cpu import attention as vllm_attention
from qarl.process import vllm_missing
from qarl.quant.experts import QuantExperts
from qarl.quant.fsdp import ShardedQuantExperts
from qarl.quant.linear import QuantLinear
from qarl.quant.scheme import get_scheme
from qarl.quant.stacks import stacked_experts

LEVELS = ("off", "linears", "model", "exact")


@dataclass(frozen=True)
class AlignReport:
    """`asked` and the `level` that was applied; `replaced`, what kind of module -> how many; `why_lower`, if lower."""

    asked: str
    level: str
    replaced: dict[str, int]
    why_lower: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"quant.align={self.asked}" + ("" if self.level == self.asked else f" fell back to {self.level}")]
        lines += [f"  {reason}" for reason in self.why_lower]
        lines += [f"  aligned: {count} {kind}" for kind, count in self.replaced.items()]
        return "\n".join(lines)


def align_model(
    model: Any,
    level: str,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    sharded: bool = False,
) -> AlignReport:
    """Bring a transformers causal LM to `level`, in place; parameters and their names stay.

    Give it the model with its linears quantized already, and on its device; or say on what `device` and in what
    `dtype` its forward will see the weights, where FSDP moves and casts them, and that it is `sharded`.
    Raises:
        UserError: `level` does not exist, or the engine would read the model's config otherwise.
    """
    if level not in LEVELS:
        raise UserError(f"quant.align={level} is not a level", where="quant.align", fix=f"one of {', '.join(LEVELS)}")
    check_config_keys(model.config)
    parameter = next(model.parameters())
    asked = level
    experts = {}
    if level in ("model", "exact") and model.config.model_type in FAMILIES:
        experts = bf16_experts(model, device, ShardedQuantExperts if sharded else QuantExperts)
    layers = [module for module in model.modules() if isinstance(module, QuantLinear | QuantExperts)]
    level, reasons = resolve_level(
        model.config,
        level,
        device_type=(device or parameter.device).type,
        dtype=dtype or parameter.dtype,
        kernels={layer.kernel.name for layer in (*layers, *experts.values())},
    )
    if level in ("off", "linears"):
        return AlignReport(asked, level, {}, reasons)
    norms = [model.model.norm]
    for layer in model.model.layers:
        align_module(layer, AlignedDecoderLayer)
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:
        align_module(norm, AlignedRMSNorm)
    align_rotary(model)
    register_attention()
    attention = ENGINE_ATTENTION if level == "exact" else FP32_ATTENTION
    model.set_attn_implementation(attention)
    for router in routers(model).values():
        align_module(router, AlignedRouter)
    for name, replacement in experts.items():
        model.set_submodule(name, replacement)
    count = len(model.model.layers)
    replaced = {"decoder layers (residual, rotary)": count, "norms": len(norms), f"attentions ({attention})": count}
    replaced |= {"routers": len(routers(model)), "BF16 experts": len(experts)}
    return AlignReport(asked, level, {kind: number for kind, number in replaced.items() if number}, reasons)


def bf16_experts(
    model: Any, device: torch.device | None, kind: type[QuantExperts] = QuantExperts
) -> dict[str, QuantExperts]:
    """Return, by name, what replaces experts that are not quantized: the engine's operator on the same weights."""
    scheme = get_scheme("bf16")
    return {
        name: kind(experts, scheme, qualified_name=name, device=device)
        for name, experts in stacked_experts(model).items()
        if not isinstance(experts, QuantExperts)
    }


def align_rotary(model: Any) -> None:
    """Give a model whose rotary embedding is not among the plain ones the engine's own cosines and sines."""
    if not is_plain(model.config):
        align_module(model.model.rotary_emb, EngineRotaryEmbedding)
        model.model.rotary_emb.turns = match_rotary(model.config).turns


def resolve_level(
    config: Any, level: str, *, device_type: str, kernels: Collection[str], dtype: torch.dtype = torch.bfloat16
) -> tuple[str, tuple[str, ...]]:
    """The level that applies to a model with this transformers config, and why each higher one asked for does not.

    `kernels`: names of the kernels that serve its quantized linears. No model is needed.
    """
    reasons: list[str] = []
    if level == "exact" and (why_not := exact_unavailable(config, device_type, dtype, kernels)):
        level, reasons = "model", [f"exact: {why_not}"]
    if level == "model" and (why_not := model_unavailable(config, device_type, dtype)):
        level, reasons = "linears", [*reasons, f"model: {why_not}"]
    return level, tuple(reasons)


def model_unavailable(config: Any, device_type: str, dtype: torch.dtype) -> str | None:
    """Why level `model` is not built for a model with this config on such a device, or None."""
    if device_type != "cpu":
        return f"is built for cpu, not for {device_type}"
    if dtype != torch.bfloat16:
        return f"is built for BF16 weights, not for {dtype}"
    if config.model_type not in FAMILIES:
        return f"is built for {', '.join(FAMILIES)}, not for {config.model_type}"
    if why_not := rotary_unavailable(config):
        return why_not
    if config.hidden_act not in ENGINE_ACTIVATIONS:
        return f"is built for hidden_act silu, not {config.hidden_act}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "is built for full attention, not for sliding windows"
    return None


def rotary_unavailable(config: Any) -> str | None:
    """Why the trainer cannot turn queries with the engine's bits, or None."""
    if is_plain(config):
        return None
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if missing := vllm_missing():
        return f"takes cosines and sines for a rotary embedding of type {rope_type} from vLLM: {missing}"
    try:
        match = match_rotary(config)
    except Exception as error:  # `check_config_keys` refuses such a config; a plan may ask for its level before
        return f"has no rotary embedding of type {rope_type}: {type(error).__name__}: {error}"
    return None if match.equal else f"has no counterpart of vLLM's {match.engine}"


def exact_unavailable(config: Any, device_type: str, dtype: torch.dtype, kernels: Collection[str]) -> str | None:
    """Why level `exact` is not built, or not exact, for a model with this config on such a device, or None."""
    if why_not := model_unavailable(config, device_type, dtype):
        return why_not
    if "reference" in kernels:
        return "some linears or experts run the reference kernel, not the one of the engine"
    if os.environ.get("VLLM_CPU_ATTN_SPLIT_KV", "0") != "0":
        return "VLLM_CPU_ATTN_SPLIT_KV is set, with which vLLM's own attention varies with its batch"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return vllm_attention.unavailable(device_type, head_dim)
