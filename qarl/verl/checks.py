"""Refusals before a verl run starts: what verl cannot do, what its own checks find, and keys that would spoil a run.

Read in verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.errors import UserError

PLUGIN = "qarl.verl.plugin"
OLD_PLUGIN = "qarl.verl_plugin"
"""Where the plugin was before QaRL's modules became packages; configs of that time name it."""


def unsupported(config: Config) -> dict[str, str]:
    """Keys of ours that have no counterpart in verl and are not at the neutral value, with that value."""
    problems = {
        "optim.name": (config.optim.name != "adamw", "adamw"),
        "optim.master_dtype": (config.optim.master_dtype != "fp32", "fp32"),
        "rollout.rebuild_on_failure": (config.rollout.rebuild_on_failure, "false"),
    }
    return {key: neutral for key, (bad, neutral) in problems.items() if bad}


def refuse_unsupported(config: Config) -> None:
    """UserError that names all of `unsupported`."""
    if found := unsupported(config):
        raise UserError(
            "backend=verl has no counterpart of " + ", ".join(found),
            where=", ".join(found),
            fix="set " + ", ".join(f"{key}={neutral}" for key, neutral in found.items()) + ", or backend=local",
        )


def refuse_moved(keys: Mapping[str, Any], where: str) -> None:
    """UserError for `keys` of the section `verl` that name classes of QaRL by their old place, in `where`."""
    moved = {key: str(value) for key, value in keys.items() if OLD_PLUGIN in str(value)}
    if moved:
        raise UserError(
            f"{', '.join(moved)} names a class of QaRL that has moved",
            where=f"{where}: {'; '.join(f'verl.{key}: {value}' for key, value in moved.items())}",
            why=f"{OLD_PLUGIN} is now {PLUGIN}",
            fix=f"write {PLUGIN} there, and in the run's own config if it resumes",
        )


def validate(composed: Any) -> None:
    """verl's own checks, and what of its keys does not go with TBPO or spoils a checkpoint."""
    refuse_corrections(composed)
    refuse_one_checkpoint(composed)
    refuse_other_reward(composed)
    refuse_bad_time_limit(composed)
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
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


def refuse_corrections(composed: Any) -> None:
    """UserError if verl would put its own rollout correction on top of TBPO's, or take away what TBPO corrects."""
    if composed.actor_rollout_ref.actor.policy_loss.loss_mode != "tbpo":
        return
    correction = composed.algorithm.rollout_correction
    for key, neutral, why in (
        ("bypass_mode", False, "it takes the rollout's log-probs for the trainer's, and TBPO would see no mismatch"),
        ("rollout_is", None, "it weighs the tokens once more, and TBPO has its own weight of the whole sequence"),
    ):
        if value := correction.get(key):
            raise UserError(
                f"rollout_correction.{key}={value} does not go with TBPO",
                where=f"verl.algorithm.rollout_correction.{key}",
                why=why,
                fix=f"set it to {'null' if neutral is None else 'false'}, or choose another loss_mode of verl's",
            )


def refuse_ignored(composed: Any) -> None:
    """UserError for keys of verl's that a run of ours takes no notice of, or that only the engine would honour."""
    from qarl.config.checks import MIN_TEMPERATURE

    keys = "actor_rollout_ref.rollout"
    rollout, mode = composed.actor_rollout_ref.rollout, composed.trainer.v1.trainer_mode
    for name in ("temperature", "top_p", "top_k"):
        value = rollout[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{keys}.{name} must be a number, got {value!r}", where=f"verl.{keys}.{name}")
    whole = "the engine would sample from the likeliest tokens only, and the trainer's log-probs are over all"
    below = f"vLLM samples at {MIN_TEMPERATURE} instead, and the trainer's log-probs would be of another temperature"
    problems = [
        (rollout.top_p != 1, f"{keys}.top_p", rollout.top_p, 1, whole),
        (rollout.top_k > 0, f"{keys}.top_k", rollout.top_k, -1, whole),
        (rollout.temperature < MIN_TEMPERATURE, f"{keys}.temperature", rollout.temperature, MIN_TEMPERATURE, below),
        (
            mode != "sync",
            "trainer.v1.trainer_mode",
            mode,
            "sync",
            "responses would be of several versions of the weights, which quant.mismatch_limit takes for a mistake",
        ),
        (not composed.trainer.use_v1, "trainer.use_v1", False, True, "a run of QaRL's is verl's v1 trainer"),
    ]
    for wrong, key, value, neutral, why in problems:
        if wrong:
            raise UserError(
                f"{key}={value} does not go with backend=verl", where=f"verl.{key}", why=why, fix=f"set it to {neutral}"
            )


def refuse_one_checkpoint(composed: Any) -> None:
    """UserError if verl would delete the only whole checkpoint before the next one is written."""
    trainer = composed.trainer
    if trainer.max_actor_ckpt_to_keep == 1 or trainer.get("remove_previous_ckpt_in_save"):
        raise UserError(
            "verl cannot keep a single checkpoint safely",
            where="trainer.max_ckpt_to_keep",
            why="it deletes the earlier one before the next one is whole, so a run killed in between has none",
            fix="set trainer.max_ckpt_to_keep=2 or more",
        )


def refuse_other_reward(composed: Any) -> None:
    """UserError if the reward is not the one that was checked: verl's own way sets no time limit and takes NaN."""
    given = composed.reward.custom_reward_function
    if given.path != "pkg://qarl.verl.plugin.reward" or given.name != "score":
        raise UserError(
            "the section verl names another reward function",
            where="verl.reward.custom_reward_function",
            why="it would get neither the checks before the run nor reward.timeout_s",
            fix="set reward.function to it",
        )


def refuse_bad_time_limit(composed: Any) -> None:
    """UserError for a time limit of publishes that the first publish would refuse, minutes later."""
    from omegaconf import OmegaConf

    from qarl.verl.plugin.publishing import TIMEOUT_VARIABLE, publish_timeout

    variables = OmegaConf.select(composed, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    publish_timeout(str(variables.get(TIMEOUT_VARIABLE) or ""))


def refuse_no_export(config: Config, composed: Any) -> None:
    """UserError if keys of the section `verl` leave no checkpoint for the export of the end."""
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
