"""`quant.align`: how much of the rollout engine's arithmetic the trainer's forward copies.

    off       nothing: the trainer is plain BF16, and only the rollout is quantized
    linears   low-bit GEMMs on the published tensors (`qarl.quant.convert.quantize_model`)
    model     also the engine's rounding of residual additions, norms and rotary embedding, and the best attention that
              the device has: on a CPU the engine's own operator, so that this level is `exact` there
    exact     the same. The report says why if the operator cannot be called, and the limit on the mismatch is nearly 0.
              δ (`qarl.metrics.step_metrics`) is 0. For prompts of more than about 300 tokens this needs one thread, and
              an engine that prefills each prompt in one piece

`align_model` applies levels `model` and `exact`. Both exist for Llama, Qwen2, Qwen3 and Qwen3-MoE against vLLM on CPU.
For experts they also use the engine's router and, if the experts are BF16, the engine's operator. On a GPU, `model`
exists for dense models (`qarl.align.cuda`). Other models and devices get the next lower level, and the report says why.

Where the operator cannot be called (an operator without this head size, a linear by the reference kernel), the order of
attention's FP32 sums differs from the engine's. Then about one output in 10,000 is off by a BF16 step.

The guard of a run (`qarl.metrics.mismatch_limit`) measures with `engine_arithmetic`, which brings a model to level
`model` for a while, and with `qarl.align.rounding_noise`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from qarl.align.cpu import (
    AlignedAttention,
    AlignedDecoderLayer,
    AlignedLinear,
    AlignedRMSNorm,
    align_module,
    aligned_class,
)
from qarl.align.cpu_attention import (
    ENGINE_ATTENTION,
    FP32_ATTENTION,
    engine_attention,
    fp32_attention,
)
from qarl.align.cuda import align_layers, unavailable_on_cuda, unconfirmed_on_cuda
from qarl.align.families import FAMILIES
from qarl.align.model_config import ENGINE_ACTIVATIONS, check_config_keys
from qarl.align.packed_attention import register_attention, use_rows_attention
from qarl.align.rotary import EngineRotaryEmbedding, head_size_of, is_plain, match_rotary
from qarl.align.router import AlignedRouter, routers
from qarl.errors import UserError
from qarl.kernels.cpu import layer_ops
from qarl.lora.layers import adapted_class
from qarl.process import vllm_unusable, vllm_without_device
from qarl.quant.experts import QuantExperts, stacked_experts
from qarl.quant.fsdp import ShardedQuantExperts
from qarl.quant.linear import QuantLinear
from qarl.schemes import UNQUANTIZED

LEVELS = ("off", "linears", "model", "exact")
EXACT_PROMPT = 300
"""At level `exact`, prompts of up to about this number of tokens have δ = 0 with any number of threads (measured for
heads of 128; with smaller heads the number is larger)."""


@dataclass(frozen=True)
class AlignReport:
    """The result of `align_model`: the level `asked` for, and the `level` that was applied.

    `why_lower`: the reasons if the applied level is lower. `replaced`: number of replaced modules, by kind.
    `unconfirmed`: why the applied level promises no mismatch on this device, or None. `threads`: of this process.
    """

    asked: str
    level: str
    replaced: dict[str, int]
    why_lower: tuple[str, ...] = ()
    unconfirmed: str | None = None
    threads: int = 1

    @property
    def limit_level(self) -> str:
        """The level whose limit on the mismatch applies (`qarl.metrics.mismatch_limit`). If `model` was asked for, that
        is its wide limit also where the level is `exact`, because with several threads δ may not be 0."""
        return "linears" if self.unconfirmed else min(self.asked, self.level, key=LEVELS.index)

    def __str__(self) -> str:
        lower = LEVELS.index(self.level) < LEVELS.index(self.asked)
        changed = (
            f" {'fell back to' if lower else 'is'} {self.level}" if self.level != self.asked else ""
        )
        limit = f" for prompts of up to about {EXACT_PROMPT} tokens, with {self.threads} threads"
        limited = self.level == "exact" and self.threads > 1
        lines = [f"quant.align={self.asked}{changed}{limit if limited else ''}"]
        lines += [f"  {reason}" for reason in self.why_lower]
        lines += [f"  {self.unconfirmed}"] if self.unconfirmed else []
        lines += [f"  aligned: {count} {kind}" for kind, count in self.replaced.items()]
        return "\n".join(lines)


def align_model(
    model: Any,
    level: str,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    sharded: bool = False,
    workers: int = 1,
    eager: bool = False,
    adapters: bool = False,
) -> AlignReport:
    """Bring a transformers causal LM to `level`, in place. Parameters and their names stay the same.

    Quantize the model's linears first (`quantize_model`). Raises UserError if `level` does not exist, or if the engine
    would read the model's config differently than the trainer.

    Args:
        device: where the forward will run. Default: the device of the weights.
        dtype: dtype of the weights in the forward. Default: their current dtype.
        sharded: whether FSDP shards the model.
        workers: number of workers that one engine is split over.
        eager: whether the engine runs without CUDA graphs (rollout.enforce_eager=true).
        adapters: whether linears will get adapters (lora.r).
    """
    if level not in LEVELS:
        raise UserError(
            f"quant.align={level} is not a level",
            where="quant.align",
            fix=f"use one of {', '.join(LEVELS)}",
        )
    check_config_keys(model.config)
    parameter = next(model.parameters())
    asked = level
    device_type = (device or parameter.device).type
    experts = {}
    if level in ("model", "exact") and model.config.model_type in FAMILIES and device_type == "cpu":
        experts = bf16_experts(model, device, ShardedQuantExperts if sharded else QuantExperts)
    layers = [
        module for module in model.modules() if isinstance(module, QuantLinear | QuantExperts)
    ]
    level, reasons = resolve_level(
        model.config,
        level,
        device_type=device_type,
        dtype=dtype or parameter.dtype,
        kernels={layer.kernel.name for layer in (*layers, *experts.values())},
        workers=workers,
    )
    if level in ("off", "linears"):
        use_rows_attention(model)
        return AlignReport(asked, level, {}, reasons)
    if device_type != "cpu":
        missing = unconfirmed(level, device_type, model.config, eager=eager, adapters=adapters)
        return AlignReport(asked, level, align_layers(model), reasons, missing)
    replaced = _align_on_cpu(model, experts, exact=level == "exact")
    numbers = {kind: number for kind, number in replaced.items() if number}
    return AlignReport(asked, level, numbers, reasons, threads=torch.get_num_threads())


def _align_on_cpu(
    model: Any, experts: Mapping[str, QuantExperts], *, exact: bool
) -> dict[str, int]:
    """Replace the modules whose arithmetic differs from the engine's on a CPU. Return their numbers by kind.

    `experts`: replacements of unquantized experts, by name."""
    norms = [model.model.norm]
    for layer in model.model.layers:
        align_module(layer, AlignedDecoderLayer)
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [
            getattr(layer.self_attn, name)
            for name in ("q_norm", "k_norm")
            if hasattr(layer.self_attn, name)
        ]
        if exact:
            align_module(layer.self_attn, AlignedAttention)
    for norm in norms:
        align_module(norm, AlignedRMSNorm)
    align_rotary(model)
    attention, function = (
        (ENGINE_ATTENTION, engine_attention) if exact else (FP32_ATTENTION, fp32_attention)
    )
    register_attention(attention, function)
    model.set_attn_implementation(attention)
    for router in routers(model).values():
        align_module(router, AlignedRouter)
    for name, replacement in experts.items():
        model.set_submodule(name, replacement)
    for module in list(model.modules()) if torch.cpu._is_amx_tile_supported() else ():
        if type(module) is nn.Linear:
            align_module(module, AlignedLinear)
        elif type(module) is adapted_class(nn.Linear):  # the adapter adds to the product
            module.__class__ = cast(Any, adapted_class)(
                cast(Any, aligned_class)(AlignedLinear, nn.Linear)
            )
    count = len(model.model.layers)
    replaced = {
        "decoder layers (residual, rotary)": count,
        "norms": len(norms),
        f"attentions ({attention})": count,
    }
    return replaced | {"routers": len(routers(model)), "BF16 experts": len(experts)}


def bf16_experts(
    model: Any, device: torch.device | None, kind: type[QuantExperts] = QuantExperts
) -> dict[str, QuantExperts]:
    """Return replacements, by name, for the layers of experts that are not quantized. A replacement runs the engine's
    operator on the same weights.
    """
    scheme = UNQUANTIZED
    return {
        name: kind(experts, scheme, qualified_name=name, device=device)
        for name, experts in stacked_experts(model).items()
        if not isinstance(experts, QuantExperts)
    }


def align_rotary(model: Any) -> None:
    """Make the model use the engine's cosines and sines, unless `is_plain` says that they are equal."""
    if not is_plain(model.config):
        align_module(model.model.rotary_emb, EngineRotaryEmbedding)
        model.model.rotary_emb.turns = match_rotary(model.config).turns


def resolve_level(
    config: Any,
    level: str,
    *,
    device_type: str,
    kernels: Collection[str],
    dtype: torch.dtype = torch.bfloat16,
    workers: int = 1,
    capability: tuple[int, int] | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Return the level that applies to this transformers config, and the reasons if it is lower than `level`.

    `exact` applies instead of `model` wherever it exists.

    `kernels`: names of the kernels of the model's quantized linears. `workers`: number of workers that one engine is
    split over. `capability`: compute capability of the GPU. Default: that of this process's GPU, if it has one.
    """
    reasons: list[str] = []
    split = split_unavailable(workers)
    if device_type == "cuda" and torch.cuda.is_available():
        capability = capability or torch.cuda.get_device_capability()
    if level == "exact" and (
        why_not := exact_unavailable(config, device_type, dtype, kernels, capability) or split
    ):
        level = "model"
        reasons = [f"exact: {why_not}"]
    elif level == "model" and not (
        exact_unavailable(config, device_type, dtype, kernels, capability) or split
    ):
        level = "exact"
    if level == "model" and (
        why_not := model_unavailable(config, device_type, dtype, capability) or split
    ):
        level = "linears"
        reasons = [*reasons, f"model: {why_not}"]
    return level, tuple(reasons)


def unconfirmed(
    level: str, device_type: str, config: Any, *, eager: bool, adapters: bool = False
) -> str | None:
    """Return why an applied level promises no mismatch for this transformers config, or None.

    `eager`: whether the engine runs without CUDA graphs. `adapters`: whether it has adapters.
    """
    if device_type != "cuda" or level != "model":
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
    config: Any, device_type: str, dtype: torch.dtype, capability: tuple[int, int] | None = None
) -> str | None:
    """Return why level `model` cannot be used for this config, device and dtype, or None if it can."""
    if device_type not in ("cpu", "cuda"):
        return f"is built for cpu and cuda, not for {device_type}"
    if dtype != torch.bfloat16:
        return f"is built for BF16 weights, not for {dtype}"
    if config.model_type not in FAMILIES:
        return f"is built for {', '.join(FAMILIES)}, not for {config.model_type}"
    if why_not := rotary_unavailable(config, device_type):
        return why_not
    if config.hidden_act not in ENGINE_ACTIVATIONS:
        return f"is built for hidden_act silu, not {config.hidden_act}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "is built for full attention, not for sliding windows"
    return unavailable_on_cuda(config, capability) if device_type == "cuda" else None


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
    kernels: Collection[str],
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return why level `exact` cannot be used for this config, device and dtype, or None if it can."""
    if why_not := model_unavailable(config, device_type, dtype, capability):
        return why_not
    if device_type != "cpu":
        return f"is built for cpu, not for {device_type}"
    if "reference" in kernels:
        return "some linears or experts run the reference kernel, not the engine's"
    if os.environ.get("VLLM_CPU_ATTN_SPLIT_KV", "0") != "0":
        return (
            "VLLM_CPU_ATTN_SPLIT_KV is set, so the result of vLLM's attention depends on the batch"
        )
    return layer_ops.attention_unavailable(device_type, head_size_of(config))


@contextmanager
def engine_arithmetic(model: Any, *, dtype: torch.dtype | None = None) -> Iterator[bool]:
    """Align a BF16 transformers model on a CPU to level `model`, and undo it at the end of the context.

    At `off` and `linears` rounding hides small mistakes. Where level `model` exists, the guard compares the engine with
    the same weights and buffers at `model`, where healthy runs have a mismatch of 0, or nearly.

    Yield whether level `model` exists for it. If not, nothing changes. `dtype`: dtype of the weights in the forward, if
    FSDP2 gathers another one than it shards. FSDP2 may shard the model, except experts that are not quantized."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or model_unavailable(
        model.config, "cpu", dtype or parameter.dtype
    ):
        yield False
        return
    modules = dict(model.named_modules())
    classes = {name: type(module) for name, module in modules.items()}
    attention = model.config._attn_implementation
    try:
        yield align_model(model, "model", dtype=torch.bfloat16).level in ("model", "exact")
    finally:
        for name, module in modules.items():
            module.__class__ = classes[name]
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        model.set_attn_implementation(attention)
