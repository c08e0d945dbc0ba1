"""Refuses settings that QaRL's TRL trainer does not support, before it loads a model or starts an engine.

TRL is pinned for two reasons. Exact log-probs and the check of rewards override private methods
(`GRPOTrainer._get_per_token_logps_and_entropies`, `_calculate_rewards`). `rollout_func` is experimental in TRL.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from qarl.checks.registry import RunInputs
from qarl.checks.run import make_checks
from qarl.config import Config
from qarl.errors import UserError
from qarl.trl.config import QaRLConfig, in_trls_words

TRL_VERSION = "1.16.0"
TRL_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
LOSSES = ("tbpo", *TRL_LOSSES)
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def check_version() -> None:
    """Raise UserError unless the installed TRL is the one that QaRL was written for."""
    installed = importlib.metadata.version("trl")
    if installed != TRL_VERSION:
        raise UserError(
            f"qarl.trl needs trl=={TRL_VERSION}, but {installed} is installed",
            where="the Python environment",
            why="it overrides a private method of TRL, and other versions of TRL may call this method differently",
            fix=f"pip install trl=={TRL_VERSION}",
        )


def check_args(args: Any) -> None:
    """Raise UserError for the first setting of `args` that QaRL does not support."""
    if not isinstance(args, QaRLConfig):
        raise UserError(
            f"QaRLTrainer needs a QaRLConfig, got {type(args).__name__}",
            where="args",
            why="a different config does not have QaRL's settings",
            fix="from qarl.trl import QaRLConfig, and pass args=QaRLConfig(...)",
        )
    rounding = "the forward must round as the engine does, and this setting changes its arithmetic"
    tokens = "the engine would sample from probabilities that differ from the trainer's"
    neutral: list[tuple[str, object, str]] = [
        ("bf16", False, f"{rounding}: autocast on a BF16 model"),
        ("fp16", False, rounding),
        ("use_liger_kernel", False, rounding),
        ("cast_lm_head_to_fp32", False, f"{rounding}: the engine's logits are BF16"),
        ("torch_compile", False, rounding),
        ("deepspeed", None, "DeepSpeed keeps weights in its own flat buffers, which QaRL cannot quantize"),
        ("use_vllm", False, "QaRL starts its own vLLM and publishes quantized weights to it"),
        ("use_transformers_continuous_batching", False, "QaRL's vLLM samples the rollouts"),
        ("top_p", 1.0, tokens),
        ("min_p", None, tokens),
        ("repetition_penalty", 1.0, tokens),
        ("generation_kwargs", None, "QaRL's vLLM takes only temperature and max_completion_length"),
        ("vllm_tensor_parallel_size", 1, "each process has an engine of one worker"),
        ("neftune_noise_alpha", None, "the trainer's embeddings would differ from the engine's"),
    ]
    neutral += [("top_k", 0, tokens)] * (args.top_k != -1)
    for name, wanted, why in neutral:
        value = getattr(args, name)
        if value != wanted and not (wanted is None and not value):
            what = f"QaRLTrainer does not support {name}={value!r}"
            raise UserError(what, where=name, why=why, fix=f"set {name}={wanted}")
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true"):
        raise UserError(
            "QaRLTrainer does not support FSDP",
            where="fsdp, or accelerate's configuration",
            why="a publish needs all weights in each process",
            fix="use DistributedDataParallel, or backend=verl of QaRL, which shards quantized weights",
        )
    if (precision := args.mixed_precision) not in (None, "no"):
        raise UserError(
            f"QaRLTrainer does not support accelerate's mixed_precision={precision}",
            where="accelerate launch --mixed_precision, accelerate's configuration, or ACCELERATE_MIXED_PRECISION",
            why=f"{rounding}: autocast on a BF16 model",
            fix="set mixed_precision to no",
        )
    _check_choices(args)
    _check_terms(args)
    _check_saves(args)


def _check_choices(args: QaRLConfig) -> None:
    for name, value, allowed in (
        ("loss_type", args.loss_type, LOSSES),
        ("optim", getattr(args.optim, "value", args.optim), OPTIMIZERS),
    ):
        if value not in allowed:
            raise UserError(
                f"QaRLTrainer does not support {name}={value!r}", where=name, fix=f"use one of {', '.join(allowed)}"
            )
    if args.max_completion_length is None:
        raise UserError(
            "max_completion_length is not set",
            where="max_completion_length",
            why="the engine needs a limit on the response",
            fix="set it to a number of tokens",
        )


def _check_terms(args: QaRLConfig) -> None:
    """TBPO has none of TRL's further terms, so a value for one would have no effect."""
    neutral = {
        "beta": 0.0,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
    }
    if args.loss_type != "tbpo":
        return
    for name, wanted in neutral.items():
        if getattr(args, name) != wanted:
            raise UserError(
                f"loss_type=tbpo does not support {name}={getattr(args, name)}",
                where=name,
                why="TBPO has no such term, so the value would have no effect",
                fix=f"set {name}={wanted}, or choose one of TRL's losses",
            )


def _check_saves(args: QaRLConfig) -> None:
    """Raise UserError if a checkpoint is due between two optimizer steps on the same rollouts.

    TRL does not save rollouts, so a run could not resume there."""
    assert args.steps_per_generation is not None  # TRL has set it
    steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    if strategy == "no" or steps <= 1:
        return
    if strategy != "steps" or args.save_steps < 1 or args.save_steps % steps:
        raise UserError(
            f"save_strategy={strategy}, save_steps={args.save_steps:g} would write checkpoints that resume differently",
            where="save_strategy, save_steps",
            why=f"rollouts serve {steps:g} optimizer steps, and TRL's checkpoints do not contain them",
            fix=f"set save_strategy=steps and make save_steps a multiple of {steps:g}, or set save_strategy=no",
        )


def check_arguments(given: dict[str, Any]) -> None:
    """Raise UserError for arguments of `GRPOTrainer` that QaRL's trainer sets itself or does not support.

    `given` maps an argument's name to its value."""
    reasons = {
        "peft_config": "a publish sends whole weights and does not merge adapters into them",
        "quantization_config": "it would quantize the weights that QaRL trains; quant_scheme quantizes the forward",
        "rollout_func": "QaRL's own rollout_func calls the quantized engine",
        "tools": "QaRL's engine makes one response to each prompt",
        "environment_factory": "QaRL's engine makes one response to each prompt",
    }
    for name, why in reasons.items():
        if given.get(name):
            raise UserError(f"QaRLTrainer does not support {name}", where=name, why=why, fix=f"leave {name} out")
    if given.get("optimizers", (None, None))[0] is not None:
        raise UserError(
            "QaRLTrainer does not support an optimizer from outside",
            where="optimizers",
            why="its own AdamW keeps FP32 copies of the BF16 weights; without them, small updates would be lost",
            fix="pass optimizers=(None, scheduler), or leave optimizers out",
        )


def check_inputs(config: Config) -> RunInputs:
    """Make QaRL's checks of model, machine and layers (`qarl.checks.run`). Return the tokenizer and model config."""
    inputs: RunInputs = in_trls_words(lambda: make_checks(config, data=False))
    return inputs
