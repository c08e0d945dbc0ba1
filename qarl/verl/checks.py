"""Checks before a verl run starts: keys that verl does not support, verl's own checks, and keys that would spoil a run.

Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.errors import UserError

PLUGIN = "qarl.verl.plugin"
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
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_model_parallel_size",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "optim.master_dtype",
    "actor_rollout_ref.actor.optim.optimizer": "optim.name",
    "actor_rollout_ref.actor.optim.optimizer_impl": "optim.name",
}
"""verl's keys that the section `verl` may not set, each with QaRL's key to set instead. QaRL reads only its own keys to
check model and data, to choose the checkpoint and to decide whether the run is finished."""


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
    if found := unsupported(config):
        raise UserError(
            "backend=verl supports only " + ", ".join(f"{key}={neutral}" for key, neutral in found.items()),
            where=", ".join(found),
            fix="set " + ", ".join(f"{key}={neutral}" for key, neutral in found.items()) + ", or backend=local",
        )


def refuse_own(keys: Mapping[str, Any]) -> None:
    """Raise UserError if `keys` (the section `verl`) sets a verl key that QaRL has its own key for (`OWN_KEYS`)."""
    if found := {key: OWN_KEYS[plain] for key in keys if (plain := key.removeprefix("+")) in OWN_KEYS}:
        raise UserError(
            f"the section verl sets {', '.join(found)}, but QaRL has its own keys for that",
            where=", ".join(f"verl.{key}" for key in found),
            why="QaRL would check, resume and summarize a different run from the one that verl makes",
            fix="set " + ", ".join(sorted(set(found.values()))) + " instead",
        )


def validate(composed: Any) -> None:
    """Run verl's own checks, and refuse verl keys that contradict TBPO or would spoil a checkpoint."""
    refuse_one_checkpoint(composed)
    refuse_other_reward(composed)
    refuse_bad_time_limit(composed)
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from qarl.verl.plugin.before_ray import check_composed

    try:
        check_composed(composed)
        validate_config(
            config=composed,
            use_reference_policy=need_reference_policy(composed),
            use_critic=need_critic(composed),
        )
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
    from qarl.config.checks import MIN_TEMPERATURE

    keys = "actor_rollout_ref.rollout"
    rollout, mode = composed.actor_rollout_ref.rollout, composed.trainer.v1.trainer_mode
    for name in ("temperature", "top_p", "top_k"):
        value = rollout[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{keys}.{name} must be a number, got {value!r}", where=f"verl.{keys}.{name}")
    whole = "the engine would sample only from the likeliest tokens, but the trainer's log-probs cover all tokens"
    below = f"vLLM samples at {MIN_TEMPERATURE} instead, but the trainer's log-probs would use the lower temperature"
    problems = [
        (rollout.top_p != 1, f"{keys}.top_p", rollout.top_p, 1, whole),
        (rollout.top_k > 0, f"{keys}.top_k", rollout.top_k, -1, whole),
        (rollout.temperature < MIN_TEMPERATURE, f"{keys}.temperature", rollout.temperature, MIN_TEMPERATURE, below),
        (
            mode not in ("sync", "qarl_sync"),
            "trainer.v1.trainer_mode",
            mode,
            "qarl_sync",
            "responses would come from several versions of the weights, and quant.mismatch_limit would report an error",
        ),
        (not composed.trainer.use_v1, "trainer.use_v1", False, True, "QaRL runs only in verl's v1 trainer"),
        (
            "file" not in (composed.trainer.logger or ()),
            "trainer.logger",
            composed.trainer.logger,
            "a list that contains file",
            "QaRL reads the metrics from verl's file logger; without it the run would end as if it had taken no step",
        ),
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


def refuse_other_reward(composed: Any) -> None:
    """Raise UserError if verl would not call QaRL's reward function, which adds a time limit and refuses NaN."""
    given = composed.reward.custom_reward_function
    if given.path != "pkg://qarl.verl.plugin.reward" or given.name != "score":
        raise UserError(
            "the section verl names another reward function",
            where="verl.reward.custom_reward_function",
            why="QaRL would neither check it before the run nor apply reward.timeout_s to it",
            fix="name that function in reward.function instead",
        )


def refuse_bad_time_limit(composed: Any) -> None:
    """Raise UserError for an invalid publish timeout, which would otherwise fail only at the first publish."""
    from omegaconf import OmegaConf

    from qarl.verl.plugin.publishing import TIMEOUT_VARIABLE, publish_timeout

    variables = OmegaConf.select(composed, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    publish_timeout(str(variables.get(TIMEOUT_VARIABLE) or ""))


def refuse_no_export(config: Config, composed: Any) -> None:
    """Raise UserError if keys of the section `verl` leave no checkpoint to export at the end of the run."""
    folder = Path(composed.trainer.default_local_dir).resolve()
    problems = {
        "trainer.save_freq": composed.trainer.save_freq <= 0,
        "trainer.default_local_dir": folder != (config.run_dir / "checkpoints").resolve(),
        "actor_rollout_ref.actor.checkpoint.save_contents": "model"
        not in composed.actor_rollout_ref.actor.checkpoint.save_contents,
    }
    wrong = [f"verl.{key}" for key, bad in problems.items() if bad]
    if config.trainer.save_final and wrong:
        raise UserError(
            "there would be no checkpoint to export at the end",
            where=", ".join(wrong),
            why="trainer.save_final exports the run's last checkpoint, from RUN/checkpoints",
            fix="leave the key out, or set trainer.save_final=false",
        )
