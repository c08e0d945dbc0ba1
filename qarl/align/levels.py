"""Bring a model to an alignment level: how much of the rollout engine's arithmetic the trainer's forward copies.

    off       nothing: the trainer is plain BF16, and only the rollout is quantized
    linears   low-bit GEMMs on the published tensors (`qarl.quant.convert.quantize_model`)
    model     also the engine's rounding of residual additions, norms and rotary embedding, and the best attention that
              the device has: on a CPU the engine's own operator, so that this level is `exact` there
    exact     the same. The report says why if the operator cannot be called, and the limit on the mismatch is nearly 0.
              δ (`qarl.metrics.step_metrics`) is 0. For long prompts (`qarl.kernels.cpu.attention_tiles`) this needs one
              thread, and an engine that prefills each prompt in one piece

`align_model` applies levels `model` and `exact` where `qarl.align.applied_level` finds that they exist. For experts
they also use the engine's router and, if the experts are BF16, the engine's operator. Other models and devices get the
next lower level, and the report says why. The model's family names the function that aligns its layers and norms
(`qarl.families.base.Family.layers`).

Where the operator cannot be called (an operator without this head size, a linear by the reference kernel), the order of
attention's FP32 sums differs from the engine's. Then about one output in 10,000 is off by a BF16 step.

The guard of a run (`qarl.metrics.mismatch_limit`) measures with `engine_arithmetic`, which brings a model to level
`model` for a while, and with `qarl.align.rounding_noise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from qarl.align.applied_level import AppliedLevel, model_unavailable, resolve_level, unconfirmed
from qarl.align.cpu import (
    AlignedLinear,
    align_module,
    aligned_class,
)
from qarl.align.cpu_attention import (
    ENGINE_ATTENTION,
    FP32_ATTENTION,
    engine_attention,
    fp32_attention,
)
from qarl.align.model_config import check_config_keys
from qarl.align.packed_attention import register_attention, use_rows_attention
from qarl.align.rotary import EngineRotaryEmbedding, head_size_of, is_plain, match_rotary
from qarl.align.router import AlignedRouter, routers
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.families import family_of
from qarl.kernels.base import ExpertsKernel
from qarl.kernels.cpu.attention_tiles import longest_exact_prompt
from qarl.kernels.cuda import whole_sums
from qarl.lora.layers import adapted_class
from qarl.quant.experts import QuantExperts, stacked_experts
from qarl.quant.fsdp import ShardedQuantExperts
from qarl.quant.linear import QuantLinear
from qarl.schemes import UNQUANTIZED


@dataclass(frozen=True)
class AlignReport(AppliedLevel):
    """The result of `align_model`: the level `asked` for, and the `level` that was applied.

    `why_lower`: the reasons if the applied level is lower. `replaced`: number of replaced modules, by kind.
    `unconfirmed`: why the applied level promises no mismatch on this device, or None. `threads`: of this process.
    `exact_prompt`: tokens of the longest prompt that several threads do not change.
    """

    replaced: Mapping[str, int] = field(default_factory=dict)
    unconfirmed: str | None = None
    threads: int = 1
    exact_prompt: int = 0

    @property
    def limit_level(self) -> Level:
        """The level whose limit on the mismatch applies (`qarl.metrics.mismatch_limit`). If `model` was asked for, that
        is its wide limit also where the level is `exact`, because with several threads δ may not be 0."""
        return Level.LINEARS if self.unconfirmed else min(self.asked, self.level)

    def __str__(self) -> str:
        first = f"quant.align={self.asked}"
        if self.level != self.asked:
            verb = "fell back to" if self.level < self.asked else "is"
            first += f" {verb} {self.level}"
        if self.level.zero_mismatch and self.threads > 1:
            first += (
                f" for prompts of up to {self.exact_prompt} tokens, with {self.threads} threads"
            )
        details = [*self.why_lower]
        if self.unconfirmed:
            details.append(self.unconfirmed)
        details += [f"aligned: {count} {kind}" for kind, count in self.replaced.items()]
        return "\n".join([first, *(f"  {detail}" for detail in details)])


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
        level: a `Level`, or its name.
        device: where the forward will run. Default: the device of the weights.
        dtype: dtype of the weights in the forward. Default: their current dtype.
        sharded: whether FSDP shards the model.
        workers: number of workers that one engine is split over.
        eager: whether the engine runs without CUDA graphs (rollout.enforce_eager=true).
        adapters: whether linears will get adapters (lora.r).
    """
    asked = _known_level(level)
    check_config_keys(model.config)
    parameter = next(model.parameters())
    device_type = (device or parameter.device).type
    experts: dict[str, QuantExperts] = {}
    aligned = family_of(model.config).aligned
    if asked.follows_engine and aligned and device_type == "cpu":
        experts = bf16_experts(model, device, ShardedQuantExperts if sharded else QuantExperts)
    layers = [
        module for module in model.modules() if isinstance(module, QuantLinear | QuantExperts)
    ]
    kernels = {layer.kernel for layer in (*layers, *experts.values())}
    if device_type == "cuda" and _has_bf16_experts(model):
        kernels = {kernel for kernel in kernels if not issubclass(kernel, ExpertsKernel)}
    applied = resolve_level(
        model.config,
        asked,
        device_type=device_type,
        dtype=dtype or parameter.dtype,
        kernels=kernels,
        workers=workers,
    )
    reported = partial(AlignReport, asked, applied.level, applied.why_lower)
    if not applied.level.follows_engine:
        use_rows_attention(model)
        return reported()
    if device_type != "cpu":
        whole_sums.apply()
        missing = unconfirmed(
            applied.level, device_type, model.config, eager=eager, adapters=adapters
        )
        align_layers = family_of(model.config).load_layers(device_type)
        return reported(align_layers(model), missing)
    replaced = _align_on_cpu(model, experts, engine_attends=applied.level.zero_mismatch)
    numbers = {kind: number for kind, number in replaced.items() if number}
    exact_prompt = longest_exact_prompt(head_size_of(model.config))
    return reported(numbers, threads=torch.get_num_threads(), exact_prompt=exact_prompt)


def _known_level(level: str) -> Level:
    try:
        return Level(level)
    except ValueError:
        raise UserError(
            f"quant.align={level} is not a level",
            where="quant.align",
            fix=f"use one of {', '.join(Level)}",
        ) from None


def _align_on_cpu(
    model: Any, experts: Mapping[str, QuantExperts], *, engine_attends: bool
) -> dict[str, int]:
    """Replace the modules whose arithmetic differs from the engine's on a CPU. Return their numbers by kind.

    `experts`: replacements of unquantized experts, by name. `engine_attends`: whether attention is the engine's own
    operator, and not PyTorch's in FP32."""
    align_layers = family_of(model.config).load_layers("cpu")
    replaced = align_layers(model, engine_attends=engine_attends)
    align_rotary(model)
    attention = ENGINE_ATTENTION if engine_attends else FP32_ATTENTION
    register_attention(attention, engine_attention if engine_attends else fp32_attention)
    model.set_attn_implementation(attention)
    for router in routers(model).values():
        align_module(router, AlignedRouter)
    for name, replacement in experts.items():
        model.set_submodule(name, replacement)
    for module in list(model.modules()) if torch.cpu._is_amx_tile_supported() else ():
        if type(module) is nn.Linear:
            align_module(module, AlignedLinear)
        elif type(module) is adapted_class(nn.Linear):  # the adapter adds to the product
            aligned = cast(Any, aligned_class)(AlignedLinear, nn.Linear)
            module.__class__ = cast(Any, adapted_class)(aligned)
    return replaced | {
        f"attentions ({attention})": len(model.model.layers),
        "routers": len(routers(model)),
        "BF16 experts": len(experts),
    }


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


def _has_bf16_experts(model: Any) -> bool:
    return any(not isinstance(layer, QuantExperts) for layer in stacked_experts(model).values())


def align_rotary(model: Any) -> None:
    """Make the model use the engine's cosines and sines, unless `is_plain` says that they are equal."""
    if not is_plain(model.config):
        align_module(model.model.rotary_emb, EngineRotaryEmbedding)
        model.model.rotary_emb.turns = match_rotary(model.config).turns


@contextmanager
def engine_arithmetic(model: Any, *, dtype: torch.dtype | None = None) -> Iterator[Level | None]:
    """Align a BF16 transformers model on a CPU to level `model`, and undo it at the end of the context.

    At `off` and `linears` rounding hides small mistakes. Where level `model` exists, the guard compares the engine with
    the same weights and buffers at `model`, where healthy runs have a mismatch of 0, or nearly.

    Yield that level, or None if it does not exist for this model. Then nothing changes. `dtype`: dtype of the weights
    in the forward, if FSDP2 gathers another one than it shards. FSDP2 may shard the model, except experts that are not
    quantized."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or model_unavailable(
        model.config, "cpu", dtype or parameter.dtype
    ):
        yield None
        return
    modules = dict(model.named_modules())
    classes = {name: type(module) for name, module in modules.items()}
    attention = model.config._attn_implementation
    try:
        aligned = align_model(model, Level.MODEL, dtype=torch.bfloat16)
        yield aligned.asked if aligned.level >= aligned.asked else None
    finally:
        for name, module in modules.items():
            module.__class__ = classes[name]
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        model.set_attn_implementation(attention)
