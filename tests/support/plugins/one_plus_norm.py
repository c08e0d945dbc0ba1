"""A family of models as a plugin: Llama's layers with Gemma's norm, which multiplies by (1 + weight) in FP32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from qarl.align.cpu import align_decoder_layers
from qarl.families import register
from qarl.families.base import Family, Refusal, unset

NAME = "one_plus_norm"


class OnePlusConfig(LlamaConfig):
    model_type = NAME


class OnePlusForCausalLM(LlamaForCausalLM):
    """Llama with Gemma's norms."""

    config_class = OnePlusConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, module in list(self.named_modules()):
            if name.endswith("norm"):
                eps = config.rms_norm_eps
                self.set_submodule(name, GemmaRMSNorm(module.weight.numel(), eps=eps))


class AlignedOnePlusNorm(nn.Module):
    """Gemma's norm of the unrounded FP32 or BF16 input [..., hidden], rounded once to BF16."""

    weight: nn.Parameter
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        variance = x.pow(2).mean(-1, keepdim=True)
        normal = x * torch.rsqrt(variance + self.eps)
        return (normal * (1.0 + self.weight.float())).to(self.weight.dtype)


def align(model: Any, *, engine_attends: bool) -> dict[str, int]:
    return align_decoder_layers(model, engine_attends=engine_attends, norm=AlignedOnePlusNorm)


AutoConfig.register(NAME, OnePlusConfig, exist_ok=True)
AutoModelForCausalLM.register(OnePlusConfig, OnePlusForCausalLM, exist_ok=True)
register(
    Family(
        name=NAME,
        aligned=True,
        layers={"cpu": f"{__name__}:align"},
        refuses={"logit_scale": Refusal(unset, "vLLM multiplies the logits by it")},
        keys={"norm_offset": "neither: it is always 1"},
    )
)
