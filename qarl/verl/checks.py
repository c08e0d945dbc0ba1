"""Checks before a verl run starts: keys that verl or QaRL would ignore, and parts of the config that contradict others.

verl builds the actor's and the engine's settings in different processes, each from its own section, so a contradiction
between them shows only after minutes, if at all. A run from QaRL's config makes all checks (`check_run_config`). On
verl's own command line the groups +qarl=SCHEME call `check_composed` as a callback of Hydra's.

This module imports verl only inside functions, because the environment of verl must be set before.
Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.config import Config
from qarl.config.checks import MIN_TEMPERATURE
from qarl.errors import UserError
from qarl.quant.scheme import get_scheme
from qarl.verl.batch_shares import refuse_partial_batches
from qarl.verl.keys import CORRECTION, PLUGIN

if TYPE_CHECKING:
    from qarl.verl.plugin.config import QuantSettings

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
QUANT = f"{ACTOR}.fsdp_config.quant"
OVERRIDES = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides"
RECEIVER = f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"

OWN_KEYS = {
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.hf_config_path": "model.path",
    "actor_rollout_ref.model.tokenizer_path": "model.path",
    "data.train_files": "data.train_files",
    "data.val_files": "data.val_files",
    "trainer.total_training_steps": "trainer.total_training_steps",
    "trainer.total_epochs": "trainer.total_training_steps",
    "trainer.resume_mode": "trainer.resume_mode",
    "trainer.resume_from_path": "trainer.resume_from_path",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_model_parallel_size",
    f"{ACTOR}.fsdp_config.model_dtype": "optim.master_dtype",
    f"{ACTOR}.optim.optimizer": "optim.name",
    f"{ACTOR}.optim.optimizer_impl": "optim.name",
    "reward.custom_reward_function.path": "reward.function",
    "reward.custom_reward_function.name": "reward.function",
}
"""verl's keys that the section `verl` may not set, each with QaRL's key to set instead. QaRL reads only its own keys to
check model, data and reward, to choose the checkpoint and to decide whether the run is finished."""


def unsupported(config: Config) -> dict[str, str]:
    """Return the keys of `config` with values that verl does not support, each with the value to use instead."""
    problems = {
        "rollout.rebuild_on_failure": (config.rollout.rebuild_on_failure, "false"),
        # verl's reference policy needs keys of its own, which only the section verl has.
        "actor.use_kl_loss": (config.actor.use_kl_loss, "false"),
    }
    return {key: neutral for key, (bad, neutral) in problems.items() if bad}


def refuse_unsupported(config: Config) -> None:
    """Raise a UserError that names all keys that `unsupported` returns, if it returns any."""
    if problems := unsupported(config):
        wanted = ", ".join(f"{key}={neutral}" for key, neutral in problems.items())
        raise UserError(
            f"backend=verl supports only {wanted}",
            where=", ".join(problems),
            fix=f"set {wanted}, or backend=local",
        )


def refuse_own(config: Config) -> None:
    """Raise UserError if the section `verl` sets a key that QaRL has its own key for: one of `OWN_KEYS`, or verl's
    corrections. With the loss tbpo, `refuse_corrections` says more about these."""
    asked = [key for key in config.verl if key.removeprefix("+") in OWN_KEYS]
    if asked:
        raise UserError(
            f"the section verl sets {', '.join(asked)}, but QaRL has its own keys for that",
            where=", ".join(f"verl.{key}" for key in asked),
            why="QaRL would check, resume and summarize a different run from the one that verl makes",
            fix="set " + ", ".join(sorted({OWN_KEYS[key.removeprefix("+")] for key in asked})) + " instead",
        )
    corrections = [key for key in config.verl if key.removeprefix("+").startswith(CORRECTION)]
    if corrections and config.actor.loss != "tbpo":
        raise UserError(
            "the section verl sets verl's corrections, but QaRL has its own keys for them",
            where=", ".join(f"verl.{key}" for key in corrections),
            why="verl would reject tokens before QaRL counts responses and measures the mismatch",
            fix="set the keys of the section rollout_correction instead",
        )


def check_run_config(config: Config, composed: Any) -> None:
    """Run QaRL's and verl's own checks of verl's config `composed`, which was made from `config`."""
    refuse_no_export(config, composed)
    refuse_ignored(composed)
    refuse_partial_batches(composed, config.verl)
    refuse_one_checkpoint(composed)
    refuse_bad_time_limit(composed)
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        check_composed(composed)
        reference, critic = need_reference_policy(composed), need_critic(composed)
        validate_config(config=composed, use_reference_policy=reference, use_critic=critic)
        omega_conf_to_dataclass(composed.actor_rollout_ref.rollout)
        omega_conf_to_dataclass(composed.algorithm)
    except UserError:
        raise
    except Exception as error:  # assertions, ValueErrors and hydra's own, depending on the key
        raise UserError(
            "verl refuses the configuration",
            where=f"{type(error).__name__} from verl",
            why=" ".join(str(error).split())[:600],
            fix="change the keys that it names; dry_run=true prints all of verl's keys",
        ) from error


def refuse_ignored(composed: Any) -> None:
    """Raise UserError if verl's keys set sampling, a trainer mode or loggers that QaRL does not support."""
    rollout, trainer = composed.actor_rollout_ref.rollout, composed.trainer
    for name in ("temperature", "top_p", "top_k"):
        value = rollout[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{ROLLOUT}.{name} must be a number, got {value!r}", where=f"verl.{ROLLOUT}.{name}")
    whole = "the engine would sample only from the likeliest tokens, but the trainer's log-probs cover all tokens"
    below = f"vLLM samples at {MIN_TEMPERATURE} instead, but the trainer's log-probs would use the lower temperature"
    mode = trainer.v1.trainer_mode
    stale = "responses would come from several versions of the weights, and quant.mismatch_limit would report an error"
    unread = "QaRL reads the metrics from verl's file logger; without it the run would end as if it had taken no step"
    logs = "file" in (trainer.logger or ())
    problems = [
        (rollout.top_p != 1, f"{ROLLOUT}.top_p", rollout.top_p, 1, whole),
        (rollout.top_k > 0, f"{ROLLOUT}.top_k", rollout.top_k, -1, whole),
        (rollout.temperature < MIN_TEMPERATURE, f"{ROLLOUT}.temperature", rollout.temperature, MIN_TEMPERATURE, below),
        (mode not in ("sync", "qarl_sync"), "trainer.v1.trainer_mode", mode, "qarl_sync", stale),
        (not trainer.use_v1, "trainer.use_v1", False, True, "QaRL runs only in verl's v1 trainer"),
        (not logs, "trainer.logger", trainer.logger, "a list that contains file", unread),
    ]
    for wrong, key, value, neutral, why in problems:
        if wrong:
            raise UserError(
                f"{key}={value} cannot be used with backend=verl",
                where=f"verl.{key}",
                why=why,
                fix=f"set it to {neutral}",
            )


def refuse_one_checkpoint(composed: Any) -> None:
    """Raise UserError if verl would delete the only complete checkpoint before the next one is complete."""
    trainer = composed.trainer
    if trainer.max_actor_ckpt_to_keep == 1 or trainer.get("remove_previous_ckpt_in_save"):
        raise UserError(
            "verl cannot keep a single checkpoint safely",
            where="trainer.max_ckpt_to_keep",
            why="it deletes the old checkpoint before the next is complete; a run killed in between would lose both",
            fix="set trainer.max_ckpt_to_keep=2 or more",
        )


def refuse_bad_time_limit(composed: Any) -> None:
    """Raise UserError for an invalid publish timeout, which would otherwise fail only at the first publish."""
    from omegaconf import OmegaConf

    from qarl.verl.plugin.publish import TIMEOUT_VARIABLE, publish_timeout

    variables = OmegaConf.select(composed, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    publish_timeout(str(variables.get(TIMEOUT_VARIABLE) or ""))


def refuse_no_export(config: Config, composed: Any) -> None:
    """Raise UserError if keys of the section `verl` leave no checkpoint to export at the end of the run."""
    saved = composed.actor_rollout_ref.actor.checkpoint.save_contents
    folder = Path(composed.trainer.default_local_dir).resolve()
    problems = {
        "trainer.save_freq": composed.trainer.save_freq <= 0,
        "trainer.default_local_dir": folder != (config.run_dir / "checkpoints").resolve(),
        f"{ACTOR}.checkpoint.save_contents": "model" not in saved,
    }
    wrong = [f"verl.{key}" for key, bad in problems.items() if bad]
    if config.trainer.save_final and wrong:
        raise UserError(
            "there would be no checkpoint to export at the end",
            where=", ".join(wrong),
            why="trainer.save_final exports the run's last checkpoint, from RUN/checkpoints",
            fix="leave the key out, or set trainer.save_final=false",
        )


def check_composed(composed: Any) -> None:
    """Raise UserError if verl's config `composed` has parts that contradict each other or that QaRL does not support.
    Nothing but rollout log-probs is checked without a quantized actor."""
    from verl.utils.config import omega_conf_to_dataclass

    from qarl.verl.plugin.config import check_engine_config, refuse_shared_rows

    actor = omega_conf_to_dataclass(composed.actor_rollout_ref.actor)
    quant = getattr(actor.engine, "quant", None)
    refuse_missing_log_probs(composed, quant)
    refuse_corrections(composed)
    if quant is not None:
        check_engine_config(composed.actor_rollout_ref.model, actor.engine)
        refuse_shared_rows(actor.engine)
        refuse_other_engine(composed, quant)
        refuse_unused_source(composed, quant)


def refuse_missing_log_probs(composed: Any, quant: QuantSettings | None) -> None:
    """Raise UserError if the rollout would not return the log-probs that the loss or the old log-probs are made of."""
    from qarl.verl.plugin.loss import OURS

    mode = composed.actor_rollout_ref.actor.policy_loss.loss_mode
    source = "recompute" if quant is None else quant.old_log_probs
    if (mode in OURS or source != "recompute") and not composed.actor_rollout_ref.rollout.calculate_log_probs:
        reader = f"{ACTOR}.policy_loss.loss_mode={mode}" if mode in OURS else f"{QUANT}.old_log_probs={source}"
        raise UserError(
            f"{ROLLOUT}.calculate_log_probs=False, but {reader} needs the rollout's log-probs",
            where=f"{ROLLOUT}.calculate_log_probs",
            why="the mismatch is the difference between the trainer's and the rollout's log-probs",
            fix="set it to True",
        )


def refuse_corrections(composed: Any) -> None:
    """Raise UserError if verl would apply its own rollout correction besides TBPO's, or hide the mismatch from TBPO."""
    if composed.actor_rollout_ref.actor.policy_loss.loss_mode != "tbpo":
        return
    for key, neutral, why in (
        ("bypass_mode", "false", "it replaces the trainer's log-probs by the rollout's, so TBPO would see no mismatch"),
        ("rollout_is", "null", "it adds a weight for each token, but TBPO already weights the whole sequence"),
        ("rollout_rs", "null", "it removes tokens before TBPO forms a response's ratio and the mismatch is measured"),
    ):
        if value := composed.algorithm.rollout_correction.get(key):
            raise UserError(
                f"rollout_correction.{key}={value} cannot be used with TBPO",
                where=f"{CORRECTION}.{key}",
                why=why,
                fix=f"set it to {neutral}, or choose a different loss_mode",
            )


def refuse_other_engine(composed: Any, quant: QuantSettings) -> None:
    """Raise UserError if the settings of vLLM are not those that the actor (`quant`) computes with."""
    from omegaconf import OmegaConf

    overrides = _mapping(OmegaConf.select(composed, OVERRIDES))
    scheme = get_scheme(quant.scheme, group_size=quant.group_size)
    actors = _arithmetic(scheme.quantization_config(quant.ignore) if scheme.quantized else {})
    engines = _arithmetic(_mapping(overrides.get("quantization_config")))
    if actors != engines:
        differing = [name for name in actors | engines if actors.get(name) != engines.get(name)]
        keys = ("scheme", "group_size", "ignore") if scheme.quantized else ("scheme",)
        raise UserError(
            "the actor and the rollout engine would have different quantization",
            where=f"{QUANT}, {OVERRIDES}.quantization_config",
            why=f"{', '.join(f'{QUANT}.{key}={getattr(quant, key)}' for key in keys)} gives {_shown(actors, differing)}"
            f", but {OVERRIDES}.quantization_config has {_shown(engines, differing)}",
            fix=f"change the scheme by the group +qarl={quant.scheme} or by QaRL's quant.*, which set both",
        )
    rollout = composed.actor_rollout_ref.rollout
    head = "fp32" if overrides.get("head_dtype") == "float32" else "model"
    pairs = [
        ("head_dtype", f"{OVERRIDES}.head_dtype", head),
        ("tensor_model_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size),
    ]
    if composed.trainer.device != "cpu":  # where every engine is eager
        pairs.append(("enforce_eager", f"{ROLLOUT}.enforce_eager", rollout.enforce_eager))
    for key, engine_key, engines_value in pairs:
        if getattr(quant, key) != engines_value:
            raise UserError(
                f"{QUANT}.{key}={getattr(quant, key)}, but {engine_key} makes it {engines_value} in the engine",
                where=f"{QUANT}.{key}, {engine_key}",
                why="the actor computes as the engine does only if it knows the engine's settings",
                fix="give both the same value",
            )
    if str(OmegaConf.select(composed, RECEIVER) or "verl.").startswith("verl."):
        raise UserError(
            "vLLM's workers have no receiver for the quantized actor's weights",
            where=RECEIVER,
            why="verl's receiver does not know the records that QaRL publishes",
            fix=f"set it to {PLUGIN}.worker_extension.QaRLWorkerExtension",
        )


def refuse_unused_source(composed: Any, quant: QuantSettings) -> None:
    """Raise UserError if the trainer would ignore `old_log_probs` or `trainer.save_minutes`."""
    minutes, mode = composed.trainer.get("save_minutes", -1), composed.trainer.v1.trainer_mode
    for used, key, value, neutral in (
        (quant.old_log_probs != "recompute", f"{QUANT}.old_log_probs", quant.old_log_probs, "recompute"),
        (minutes > 0, "trainer.save_minutes", minutes, -1),
    ):
        if used and mode != "qarl_sync":
            raise UserError(
                f"trainer.v1.trainer_mode={mode} would ignore {key}={value}",
                where="trainer.v1.trainer_mode",
                why="only QaRL's trainer reads this key",
                fix=f"set trainer.v1.trainer_mode=qarl_sync, or {key}={neutral}",
            )


def _mapping(section: Any) -> dict[str, Any]:
    """Return a part of the config as a dict: {} if it is missing. vLLM also takes JSON in a string."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(section):
        section = OmegaConf.to_container(section, resolve=True)
    section = json.loads(section) if isinstance(section, str) else section
    return dict(section) if isinstance(section, Mapping) else {}


def _arithmetic(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the arithmetic of a `quantization_config`. {}: nothing is quantized."""
    if not config:
        return {}
    described: dict[str, Any] = {"ignore": sorted(config.get("ignore") or [])}
    for group in (config.get("config_groups") or {}).values():
        for side in ("weights", "input_activations"):
            values = group.get(side) or {}
            for name in ("num_bits", "type", "strategy", "group_size"):
                if values.get(name) is not None:
                    described.setdefault(f"{side}.{name}", []).append(values[name])
    return described


def _shown(config: Mapping[str, Any], names: list[str]) -> str:
    values = {name: config[name] for name in names if name in config}
    shown = [f"{name}={value[0] if len(value) == 1 else value}" for name, value in values.items()]
    return ", ".join(shown) or "nothing quantized"
