"""The settings of an objective and its corrections, resolved from the config of a run.

They are the keys of `qarl.config.actor` themselves, with what an objective needs from other sections.
"""

from __future__ import annotations

from qarl.config import Config
from qarl.config.actor import ObjectiveKeys, RolloutCorrectionConfig
from qarl.config.objectives import Objective, get_objective
from qarl.tbpo.config import TBPOConfig

NO_DUAL_CLIP = 1e10
"""A `clip_ratio_c` that has no effect. verl's `vanilla` always has dual clip, with `clip_ratio_c` = 3 by default. It
clips log-ratios to 20 first, so no ratio is above e^20 = 4.9e8."""
SAME_IN_VERL = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
"""Keys that verl's actor config has under the same name."""


class Settings(ObjectiveKeys):
    """All settings of an objective.

    `loss_scale_factor`: the constant by which seq-mean-token-sum-norm divides, in tokens. `tbpo`: bands and cap. Only
    the loss `tbpo` uses them.
    """

    loss_scale_factor: int = 1
    correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    tbpo: TBPOConfig = TBPOConfig()

    @property
    def objective(self) -> Objective:
        return get_objective(self.loss)

    @property
    def needs_verl(self) -> bool:
        """Whether a function of verl is called."""
        corrected = self.correction.rejects or self.correction.rollout_is is not None
        return self.objective.needs_verl or corrected or self.use_kl_loss


def objective_settings(config: Config) -> Settings:
    """Return the settings of a run."""
    actor = config.actor
    keys = {name: getattr(actor, name) for name in ObjectiveKeys.model_fields}
    low, high = get_objective(actor.loss).clip
    keys["clip_ratio_low"] = low if actor.clip_ratio_low is None else actor.clip_ratio_low
    keys["clip_ratio_high"] = high if actor.clip_ratio_high is None else actor.clip_ratio_high
    if config.algorithm.adv_estimator == "dr_grpo":
        keys["loss_agg_mode"] = "seq-mean-token-sum-norm"
    return Settings(
        **keys,
        loss_scale_factor=config.data.max_response_length,
        correction=config.rollout_correction,
        tbpo=TBPOConfig.of(actor),
    )
