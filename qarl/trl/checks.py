"""Refuses settings, arguments and checkpoints that QaRL's TRL trainer does not support.

Settings are refused before a model is loaded or an engine starts. A resume is refused if the checkpoint's run was
quantized differently: transformers resumes from a folder with any settings. With another scheme the rest of the run
would train and sample from another policy than its beginning, and no metric would show it.

TRL is pinned for two reasons. Exact log-probs, the check of rewards and conversations override private methods
(`GRPOTrainer._get_per_token_logps_and_entropies`, `_calculate_rewards`, `_tool_call_loop`), and tools are read from
private attributes. `rollout_func` is experimental in TRL.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import get_last_checkpoint

from qarl.checks.check import NotCheckedError, RunInputs
from qarl.checks.inputs_record import Record, full_record, model_record
from qarl.checks.room import check_room_of_files
from qarl.config import Config
from qarl.console import note
from qarl.data.digests import reward_source, sources_digest
from qarl.errors import UserError
from qarl.trainer.checkpoints import published_digests
from qarl.trainer.input_changes import check_inputs
from qarl.trainer.policy import Policy
from qarl.trl.config import QUANT_KEYS, QaRLConfig
from qarl.trl.turns import Given

TRL_VERSION = "1.16.0"
TRL_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
_ROUNDING = "the forward must round as the engine does, and this setting changes its arithmetic"
_TOKENS = "the engine would sample from probabilities that differ from the trainer's"
_OWN_ENGINE = (
    "QaRL starts its own vLLM, publishes quantized weights to it, and samples the rollouts with it"
)
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "bf16": ((False,), f"{_ROUNDING}: autocast on a BF16 model"),
    "fp16": ((False,), _ROUNDING),
    "mixed_precision": (
        ("no", None),
        f"{_ROUNDING}; accelerate's configuration and environment set it too",
    ),
    "use_liger_kernel": ((False,), _ROUNDING),
    "cast_lm_head_to_fp32": ((False,), f"{_ROUNDING}: the engine's logits are BF16"),
    "torch_compile": ((False,), _ROUNDING),
    "deepspeed": (
        (None,),
        "DeepSpeed keeps weights in its own flat buffers, which QaRL cannot quantize",
    ),
    "use_vllm": ((False,), _OWN_ENGINE),
    "use_transformers_continuous_batching": ((False,), _OWN_ENGINE),
    "top_p": ((1.0,), _TOKENS),
    "top_k": ((0, -1), _TOKENS),
    "min_p": ((None, 0), _TOKENS),
    "repetition_penalty": ((1.0,), _TOKENS),
    "generation_kwargs": (
        (None, {}),
        "QaRL's vLLM takes only temperature and max_completion_length; for TRL a response that a stop text or id ends "
        "is cut off, because its last token is no EOS",
    ),
    "vllm_tensor_parallel_size": ((1,), "each process has an engine of one worker"),
    "neftune_noise_alpha": ((None, 0), "the trainer's embeddings would differ from the engine's"),
    "loss_type": (("tbpo", *TRL_LOSSES), "QaRL has TBPO, and runs these losses of TRL"),
    "optim": (
        ("adamw_torch", "adamw_torch_fused"),
        "QaRL's AdamW keeps FP32 copies of the weights",
    ),
}
"""Setting -> its supported values, and why it has no others."""
_NO_TERM = "TBPO has no such term, so the value would have no effect; TRL's losses have"
TBPO_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "beta": ((0.0,), _NO_TERM),
    "entropy_coef": ((0.0,), _NO_TERM),
    "use_adaptive_entropy": ((False,), _NO_TERM),
    "top_entropy_quantile": ((1.0,), _NO_TERM),
    "off_policy_mask_threshold": ((None,), _NO_TERM),
}
ARGUMENTS = {
    "quantization_config": "it would quantize the weights that QaRL trains; quant_scheme quantizes the forward",
    "rollout_func": "QaRL's own rollout_func calls the quantized engine",
    "optimizers": "its own AdamW keeps FP32 copies of the BF16 weights; without them, small updates would be lost",
}
"""Arguments of `GRPOTrainer` that must be left out, and why."""
FILE = "qarl.json"
INPUTS = "inputs"
COMPARED = ["master_dtype", *(f"quant_{name}" for name in QUANT_KEYS if name != "mismatch_limit")]
"""Fields that a checkpoint and the run that resumes from it must have in common."""


def check_args(args: Any, arguments: dict[str, Any]) -> None:
    """Raise UserError for the first setting of `args`, or argument in `arguments`, that QaRL does not support.

    `arguments`: arguments of `GRPOTrainer` by name, and their values."""
    installed = importlib.metadata.version("trl")
    if installed != TRL_VERSION:
        what = f"qarl.trl needs trl=={TRL_VERSION}, but {installed} is installed"
        why = "it overrides private methods of TRL, and other versions of TRL may call them differently"
        raise UserError(
            what, where="the Python environment", why=why, fix=f"pip install trl=={TRL_VERSION}"
        )
    if not isinstance(args, QaRLConfig):
        fix = "from qarl.trl import QaRLConfig, and pass args=QaRLConfig(...)"
        raise UserError(
            f"QaRLTrainer needs a QaRLConfig, got {type(args).__name__}", where="args", fix=fix
        )
    for name, (allowed, why) in (
        SETTINGS | (TBPO_SETTINGS if args.loss_type == "tbpo" else {})
    ).items():
        value = getattr(args, name)
        value = getattr(value, "value", value)  # of an Enum
        if value not in allowed:
            fix = f"set it to {' or '.join(map(str, allowed))}"
            raise UserError(
                f"QaRLTrainer does not support {name}={value!r}", where=name, why=why, fix=fix
            )
    if args.use_cpu and torch.cuda.is_available():
        why = "rollouts would run on the GPU"
        fix = "hide the GPUs (CUDA_VISIBLE_DEVICES='')"
        raise UserError(
            "QaRLTrainer does not support use_cpu beside a GPU", where="use_cpu", why=why, fix=fix
        )
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true"):
        where = "fsdp, or accelerate's configuration"
        why = "a publish needs all weights in each process"
        fix = "use DistributedDataParallel, or backend=verl of QaRL, which shards quantized weights"
        raise UserError("QaRLTrainer does not support FSDP", where=where, why=why, fix=fix)
    _check_saves(args)
    if 0 < args.max_steps <= args.warmup_steps:
        what = f"warmup_steps={args.warmup_steps} is not below max_steps={args.max_steps}"
        why = "no step would have the full learning rate"
        raise UserError(
            what, where="warmup_steps", why=why, fix="lower warmup_steps, or train for more steps"
        )
    # A scheduler may come from outside.
    arguments = arguments | {"optimizers": arguments.get("optimizers", (None, None))[0]}
    for name, why in ARGUMENTS.items():
        if arguments.get(name):
            raise UserError(
                f"QaRLTrainer does not support {name}", where=name, why=why, fix=f"leave {name} out"
            )


def check_adapter_args(args: QaRLConfig, *, begun: bool = False) -> None:
    """Raise UserError for settings that do not go with `peft_config`. `begun`: the model is a `PeftModel`, with whose
    adapter the run begins."""
    if begun and args.beta:
        raise UserError(
            f"QaRLTrainer does not support beta={args.beta!r} with a PeftModel",
            where="beta",
            why="TRL's reference is the base alone, so the KL term would pull the policy away from its adapter",
            fix="set beta=0.0; backend=local of `qarl train` has a reference with the adapter (docs/do/lora.md)",
        )
    kwargs = args.gradient_checkpointing_kwargs or {}
    reentrant = bool(args.gradient_checkpointing and kwargs.get("use_reentrant"))
    frozen = "the embeddings are frozen, so no gradient would reach the adapters"
    best = "load_best_model_at_end"
    whole = "transformers would look for a whole model in the checkpoint"
    reference = "the reference is the base alone, so TRL would copy weights to parameters that it does not have"
    for wrong, name, why, fix in (
        (getattr(args, best), best, whole, "set it to False"),
        (args.sync_ref_model, "sync_ref_model", reference, "set it to False"),
        (reentrant, "gradient_checkpointing_kwargs", frozen, "set use_reentrant=False in it"),
    ):
        if wrong:
            raise UserError(
                f"QaRLTrainer does not support {name} with peft_config",
                where=name,
                why=why,
                fix=fix,
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


def check_room(args: QaRLConfig, run: Config, inputs: RunInputs) -> None:
    """Raise StorageError if TRL will save, and `args.output_dir` has no room for a checkpoint of the model of `run`."""
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    folder = Path(args.output_dir)
    with suppress(NotCheckedError):
        check_room_of_files(folder, run, inputs.size, saves=strategy != "no", exports=False)


def settings_of(
    args: QaRLConfig, policy: Policy, lora: Mapping[str, Any], inputs: Record
) -> dict[str, Any]:
    """Return what a checkpoint and the run that resumes from it must have in common: the fields `COMPARED` of `args`,
    the record of what the run reads, and with adapters the section `lora` and a digest of their base."""
    settings = {name: getattr(args, name) for name in COMPARED} | {INPUTS: inputs}
    if policy.adapters is None:
        return settings
    digests = published_digests(policy)
    base = hashlib.sha256(
        "".join(f"{name} {digests[name]};" for name in sorted(digests)).encode()
    ).hexdigest()
    return settings | {"peft_config": dict(lora), "base": base}


def inputs_of(
    hf_config: Any, tokenizer: Any, folder: str, reward_funcs: Any, given: Given
) -> Record:
    """Return the record of what `QaRLTrainer` sees of a run's inputs: the model's config, the tokenizer, and the source
    of reward functions, tools and environments. TRL's datasets are not in it."""
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    sources: Record = {"reward": sources_digest(functions)}
    if isinstance(given.environment, str):
        sources["environment"] = reward_source(given.environment)
    elif given.sources:
        sources["environment"] = sources_digest(given.sources)
    return full_record(model_record(hf_config, tokenizer, folder) | sources)


def check_resume(asked: str | bool | None, args: QaRLConfig, settings: Mapping[str, Any]) -> None:
    """Raise UserError if the checkpoint that `train(resume_from_checkpoint=asked)` reads has other `settings`.

    A checkpoint that is missing is left to transformers, which refuses it."""
    folder = get_last_checkpoint(args.output_dir) if asked is True else asked
    if not folder or not Path(folder).is_dir():
        return
    try:
        saved: dict[str, Any] = json.loads((Path(folder) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        what = f"the checkpoint does not say how its run was quantized: {FILE} is missing or unreadable"
        fix = "start a new run from its weights: pass this folder as model, without resume_from_checkpoint"
        raise UserError(
            what, where=str(folder), why="QaRLTrainer writes this file", fix=fix
        ) from None
    names = [*settings, *(name for name in saved if name not in settings)]
    compared = [name for name in names if name != INPUTS]
    changed = [name for name in compared if saved.get(name) != settings.get(name)]
    if changed == ["base"]:
        raise UserError(
            f"the run cannot resume from {folder}: its adapter was trained on another base",
            where="model",
            why="the model's files, or the quantizer, have changed since the checkpoint was written",
            fix="restore the model's files and QaRL's version of the run; or start a new run, with another output_dir",
        )
    if changed:
        pairs = {
            name: [_in_python(each.get(name)) for each in (saved, settings)]
            for name in changed
            if name != "base"
        }
        different = (
            "its peft_config was different"
            if [*pairs] == ["peft_config"]
            else "it was quantized differently"
        )
        restore = ", ".join(f"{name}={old}" for name, (old, _) in pairs.items())
        raise UserError(
            f"the run cannot resume from {folder}: {different}",
            where="; ".join(f"{name} was {old}, now {new}" for name, (old, new) in pairs.items()),
            why="the rest of the run would be a different experiment than its beginning",
            fix=f"set {restore}; or start a new run, with another output_dir",
        )
    if INPUTS in settings:
        _check_inputs(str(folder), saved.get(INPUTS), settings[INPUTS])


def _check_inputs(folder: str, saved: Record | None, now: Record) -> None:
    """Print notes about what differs between two records. Raise UserError if it decides what is trained."""
    if saved is None:
        note(
            f"{folder} has no record of model config, tokenizer and rewards, because an older QaRL wrote it"
        )
        return
    for text in check_inputs(
        Path(folder), saved, now, fresh="start a new run, with another output_dir"
    ):
        note(text)


def _in_python(value: Any) -> str:
    """Return the expression for a setting's value. Adapters are saved as QaRL's section `lora`."""
    if not isinstance(value, dict):
        return repr(value)
    arguments = {
        "lora_alpha" if name == "alpha" else name: setting for name, setting in value.items()
    }
    return f"LoraConfig({', '.join(f'{name}={setting!r}' for name, setting in arguments.items())})"
