"""verl's keys for the objective, the advantages and the corrections of a run."""

from __future__ import annotations

from typing import Any

from qarl.config import Config
from qarl.errors import UserError
from qarl.objectives import verl_losses
from qarl.objectives.settings import SAME_IN_VERL, objective_settings
from qarl.tbpo.config import KEYS
from qarl.verl.checks import PLUGIN

_CORRECTION = "algorithm.rollout_correction"


def objective_keys(config: Config) -> dict[str, Any]:
    """Return the keys of the loss: `loss_mode`, verl's other keys, and those of `TBPOPolicyLossConfig`."""
    settings, root = objective_settings(config), "actor_rollout_ref.actor"
    ours = {name: getattr(config.actor, name) for name in KEYS} | {
        "objective": settings.loss,
        "mis_imp_ratio_cap": settings.mis_imp_ratio_cap,
        "correction": config.rollout_correction.model_dump(),
    }
    keys = {
        f"{root}.loss_agg_mode": settings.loss_agg_mode,
        f"{root}.policy_loss._target_": f"{PLUGIN}.config.TBPOPolicyLossConfig",
        f"{root}.policy_loss.loss_mode": "tbpo" if settings.loss == "tbpo" else "qarl",
        **{f"+{root}.policy_loss.{name}": value for name, value in ours.items()},
        # Used only if the section verl sets use_kl_loss. `+` selects k2's gradient, KL's own; k3's is biased.
        f"{root}.kl_loss_type": "low_var_kl+",
    }
    if settings.loss != "tbpo":
        keys |= {f"{root}.{name}": getattr(settings, name) for name in (*SAME_IN_VERL, "loss_scale_factor")}
    return keys


def algorithm_keys(config: Config) -> dict[str, Any]:
    """Return the keys of the advantages, and of the weights that verl's trainer computes for the whole batch.

    The loss applies all other corrections. So it knows the number of responses before a rejection, and the mismatch
    metrics are over all responses.
    """
    algorithm, correction = config.algorithm, config.rollout_correction
    estimator = "reinforce_plus_plus" if config.actor.loss == "reinforce" else algorithm.adv_estimator
    keys: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo" if estimator == "dr_grpo" else estimator,
        "algorithm.norm_adv_by_std_in_grpo": estimator == "grpo" and algorithm.norm_adv_by_std_in_grpo,
        # If true, verl would use the rollout's log-probs as the trainer's, which would hide every mismatch.
        "algorithm.rollout_correction.bypass_mode": False,
    }
    if verl_losses.has_weight(correction):
        keys |= {
            f"{_CORRECTION}.rollout_is": correction.rollout_is,
            f"{_CORRECTION}.rollout_is_threshold": verl_losses.weight_bounds(correction),
            f"{_CORRECTION}.rollout_is_batch_normalize": correction.rollout_is_batch_normalize,
        }
    return keys


def refuse_second_correction(config: Config) -> None:
    """Raise UserError if the section `verl` sets verl's own corrections. The loss tbpo refuses them itself."""
    given = [key for key in config.verl if key.removeprefix("+").startswith(_CORRECTION)]
    if given and config.actor.loss != "tbpo":
        raise UserError(
            "the section verl sets verl's corrections, but QaRL has its own keys for them",
            where=", ".join(f"verl.{key}" for key in given),
            why="verl would reject tokens before QaRL counts responses and measures the mismatch",
            fix="set the keys of the section rollout_correction instead",
        )
