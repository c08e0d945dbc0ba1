"""The quantized policy of `QaRLTrainer`, from a folder, or from a model that is already loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from qarl.checks.published_base import is_quantized
from qarl.config import Config
from qarl.errors import UserError
from qarl.lora.layers import Adapters
from qarl.quant.experts import stacked_experts
from qarl.schemes import get_scheme
from qarl.trainer.policy import Policy, adapters_of


def model_folder(model: str | PreTrainedModel) -> str:
    """Return the folder or name from which the engine reads config and tokenizer."""
    if isinstance(model, str):
        return model
    if not (folder := getattr(model.config, "_name_or_path", "")):
        why = "vLLM reads the model's config and tokenizer from a folder"
        fix = "save model and tokenizer to a folder, and pass that folder"
        raise UserError(
            "the model was not loaded from a checkpoint", where="model", why=why, fix=fix
        )
    return str(folder)


def quantized_already() -> UserError:
    """Return the error for a model with codes, which QaRL's own trainer takes as the base of adapters."""
    return UserError(
        "the model is quantized already",
        where="model",
        why="QaRLTrainer quantizes BF16 weights itself, and adapters on codes were never tried under TRL",
        fix="load the original BF16 checkpoint; quant_scheme says how training quantizes it; adapters on codes are "
        "trained by `qarl train` (docs/do/lora.md)",
    )


def check_unquantized(model: str | PreTrainedModel, hf_config: Any) -> None:
    """Raise UserError if the model, or the checkpoint with `hf_config` that the engine reads, is quantized already."""
    if getattr(model, "is_quantized", False) or is_quantized(hf_config):
        raise quantized_already()


def load_policy(model: str | PreTrainedModel, config: Config) -> Policy:
    """Return the quantized policy. A model that is already loaded is quantized in place.

    Raises:
        UserError: a loaded model is quantized already, or not BF16.
    """
    if isinstance(model, str):
        return Policy.load(config)
    if getattr(model, "is_quantized", False):
        raise quantized_already()
    if model.dtype != torch.bfloat16:
        why = "vLLM computes in BF16, and the trainer must round in the same way"
        fix = "load it with dtype=torch.bfloat16, or pass its folder; the optimizer keeps FP32 copies of the weights"
        raise UserError(
            f"the model is {model.dtype}, but QaRL trains BF16 models",
            where="model",
            why=why,
            fix=fix,
        )
    return quantized(model, config, adapters_of(config))


def quantized(
    model: Any, config: Config, adapters: Callable[[torch.nn.Module], Adapters] | None = None
) -> Policy:
    """Quantize and align a loaded model in place, as `Policy.load` does. `adapters`: those of `Policy`."""
    model.set_attn_implementation("sdpa")
    model.config.attention_dropout = 0.0
    quant = config.quant
    return Policy(
        model,
        get_scheme(quant.scheme, group_size=quant.group_size),
        tuple(quant.ignore),
        align=quant.align,
        router_replay="off" if stacked_experts(model) else "auto",
        kernels=quant.kernels,
        eager=config.rollout.enforce_eager is True,
        adapters=adapters,
        device=torch.device(
            "cuda" if torch.cuda.is_available() else "cpu"
        ),  # before accelerate moves it
    )
