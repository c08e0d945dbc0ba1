"""Checks that trainer and engine build the same model from a config. No weights are loaded.

The local trainer, verl's launcher and the doctor all call the same function.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from qarl.align.applied_level import AppliedLevel, resolve_level, unconfirmed
from qarl.align.cpu import AlignedLinear
from qarl.align.model_config import check_config_keys
from qarl.checks.exactness import exceptions
from qarl.checks.layers import meta_model
from qarl.config import Config
from qarl.config.ignored_layers import is_ignored
from qarl.errors import UserError
from qarl.families import family_of, names_with_plain_heads, shown_mismatch
from qarl.kernels.base import ExpertsKernel, Kernel
from qarl.kernels.registry import presumed_experts_kernel
from qarl.process import runs_on_cpu
from qarl.rollout.vllm_plugin import experts_of
from qarl.schemes import get_scheme
from qarl.vllm_versions import check_head_dtype


def has_plain_head(model: Any) -> bool:
    """Return whether the logits of a transformers causal LM are the product with lm_head's weight, and nothing more."""
    head = model.get_output_embeddings()
    plain = type(head) is nn.Linear or isinstance(head, AlignedLinear)
    return family_of(model.config).plain_head and plain and head.bias is None


def check_served(hf_config: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """Raise UserError if engine and trainer read the model's config differently. Return the model without storage."""
    check_architecture(hf_config)
    check_config_keys(hf_config)
    return meta_model(hf_config, trust_remote_code=trust_remote_code)


def level_notes(config: Config, hf_config: Any) -> list[str]:
    """Return the measured mismatch of the model's family, and notes if the applied level is lower than `quant.align`,
    if no device has confirmed it, or if it is `exact` with exceptions."""
    level = applied_level(config, hf_config).level
    engine = {"eager": config.rollout.enforce_eager is True, "adapters": bool(config.lora.r)}
    unsure = unconfirmed(level, run_device(config), hf_config, **engine)
    notes = (
        lower_level(config, hf_config),
        unsure and f"quant.align={level} is {unsure}",
        shown_mismatch(hf_config),
    )
    lines = [text for text in notes if text]
    if level.zero_mismatch:
        lines += exceptions(config, hf_config)
    return lines


def lower_level(config: Config, hf_config: Any) -> str | None:
    """If a lower alignment level than `quant.align` is applied, return a sentence that says why; otherwise None."""
    applied = applied_level(config, hf_config)
    if not applied.why_lower:
        return None
    reasons = "; ".join(applied.why_lower)
    return f"quant.align={config.quant.align} falls back to {applied.level}: {reasons}"


def applied_level(
    config: Config,
    hf_config: Any,
    device: str | None = None,
    kernels: Collection[type[Kernel]] = (),
    capability: int | None = None,
) -> AppliedLevel:
    """Return the alignment level that applies, and the reasons if it is lower than `quant.align`.

    `device`: "cpu" or "cuda". Default: this machine's. `kernels`: the trainer's kernels, if they are known. Without
    one of experts, the one that trainer and engine prefer on such a device is assumed for a mixture of experts.
    `capability`: that of the GPUs, times ten. Default: this process's. Without a GPU in this process, 9.0 is assumed.
    """
    device = device or run_device(config)
    if device == "cuda" and not any(issubclass(kernel, ExpertsKernel) for kernel in kernels):
        kernels = {*kernels, *_presumed_experts(config, hf_config, device)}
    return resolve_level(
        hf_config,
        config.quant.align,
        device_type=device,
        kernels=kernels,
        workers=config.rollout.tensor_model_parallel_size,
        capability=None if capability is None else divmod(capability, 10),
    )


def _presumed_experts(config: Config, hf_config: Any, device: str) -> list[type[Kernel]]:
    """Return the kernel that is assumed for the experts of the model, or nothing if they are not all quantized."""
    scheme = get_scheme(config.quant.scheme, config.quant.group_size)
    layers = range(hf_config.num_hidden_layers) if experts_of(hf_config) else ()
    names = [f"model.layers.{number}.mlp.experts.0.down_proj" for number in layers]
    if not scheme.quantized or any(is_ignored(name, config.quant.ignore) for name in names):
        return []
    kernel = presumed_experts_kernel(scheme.operands, config.quant.kernels, device)
    return [] if kernel is None or not names else [kernel]


def run_device(config: Config) -> str:
    """Return "cpu" or "cuda": where a run of `config` on this machine computes."""
    return "cpu" if runs_on_cpu(config.backend) else "cuda"


def check_architecture(hf_config: Any) -> None:
    """Raise UserError if trainer and engine would load different classes."""
    from transformers import AutoModelForCausalLM

    chosen: Any = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    chosen = chosen[0] if isinstance(chosen, tuple | list) else chosen
    named = list(getattr(hf_config, "architectures", None) or [])
    if chosen is not None and named and named[0] != chosen.__name__:
        raise UserError(
            f"the engine would run {named[0]}, but the trainer would run {chosen.__name__}",
            where=f"model.path: config.json: architectures, model_type={hf_config.model_type!r}",
            why="vLLM chooses a class by the key architectures, but transformers by the key model_type",
            fix=f"correct the wrong key; {chosen.__name__} belongs to model_type {hf_config.model_type!r}",
        )


def check_head(config: Config, hf_config: Any) -> None:
    """Raise UserError if `model.head_dtype=fp32` and the installed vLLM or the model's family does not allow it."""
    check_head_dtype(config.model.head_dtype)
    if config.model.head_dtype == "fp32" and not family_of(hf_config).plain_head:
        raise no_fp32_head(hf_config.model_type)


def no_fp32_head(model_type: str) -> UserError:
    """Return the error for FP32 logits with a model whose logits are not just lm_head's product."""
    return UserError(
        f"model.head_dtype=fp32 is not built for this model ({model_type})",
        where="model.head_dtype",
        why="its logits are not just lm_head's product, so casting lm_head's operands would not match the engine",
        fix=f"set model.head_dtype=model, or choose a model of one of these families: {names_with_plain_heads()}",
    )


def check_length(config: Config, hf_config: Any) -> None:
    """Raise UserError if prompt and response together exceed the model's positions."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        what = f"max_prompt_length + max_response_length = {longest} tokens, but the model has {limit} positions"
        where = "data.max_prompt_length, data.max_response_length"
        fix = f"lower them to at most {limit} together, or give a model with more positions, such as a stretched one"
        raise UserError(what, where=where, fix=fix)


def refuse_hidden_code(config: Config, tokenizer: Any, hf_config: Any) -> None:
    """Raise UserError if verl would run a model's code although the config forbids it.

    verl's reward workers always load the tokenizer with `trust_remote_code=True` (reward_loop.py of 0.9.1). So they
    run the code in a model folder even if transformers does not need it.
    """
    named = [
        getattr(hf_config, "auto_map", None),
        getattr(tokenizer, "init_kwargs", {}).get("auto_map"),
    ]
    if any(named) and not config.model.trust_remote_code:
        raise UserError(
            f"the model in {config.model.path!r} contains Python code, which verl would run",
            where="model.trust_remote_code=false",
            why="verl's reward workers always load the tokenizer with trust_remote_code=True",
            fix="remove auto_map from config.json and tokenizer_config.json; or read the code, then set "
            "model.trust_remote_code=true; or set backend=local",
        )
