"""Which models can have FP32 logits (`model.head_dtype`)."""

from __future__ import annotations

from typing import Any

from qarl.config import Config
from qarl.errors import UserError
from qarl.vllm_versions.head import check_head_dtype

PLAIN_HEADS = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""Families whose logits are lm_head's unchanged output. Other families cap or scale this output."""


def check_head(config: Config, hf_config: Any) -> None:
    """Raise UserError if `model.head_dtype=fp32` and the installed vLLM or the model's family does not allow it."""
    check_head_dtype(config.model.head_dtype)
    if config.model.head_dtype == "fp32" and hf_config.model_type not in PLAIN_HEADS:
        raise no_fp32_head(hf_config.model_type)


def no_fp32_head(model_type: str) -> UserError:
    """Return the error for FP32 logits with a model whose logits are not just lm_head's product."""
    return UserError(
        f"model.head_dtype=fp32 is not built for this model ({model_type})",
        where="model.head_dtype",
        why="its logits are not just lm_head's product, so casting lm_head's operands would not match the engine",
        fix=f"set model.head_dtype=model, or choose a model of one of these families: {', '.join(PLAIN_HEADS)}",
    )
