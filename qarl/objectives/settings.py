"""The settings of an objective and its corrections, resolved from the config of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from qarl.config import ActorConfig, Config
from qarl.config.objective_checks import SEQUENCE_LOSSES
from qarl.tbpo.config import TBPOConfig

NO_DUAL_CLIP = 1e10
"""A `clip_ratio_c` that has no effect. verl's `vanilla` always has dual clip, with `clip_ratio_c` = 3 by default. It
clips log-ratios to 20 first, so no ratio is above e^20 = 4.9e8."""
TOKEN_CLIP = (0.2, 0.2)
"""PPO's clip ratios (arXiv 1707.06347)."""
SEQUENCE_CLIP = (3e-4, 4e-4)
"""GSPO's clip ratios (arXiv 2507.18071, section 5.1)."""
NEVER = 1e-30
"""A lower bound below every weight. verl's weights are at least e^-20 = 2e-9."""
LARGEST = 700.0
"""Every K1 of a response is below this number of nats, and the exponential of this number is still a finite float."""


@dataclass(frozen=True)
class Correction:
    """The keys of the section `rollout_correction`; `qarl.config.objectives` explains them."""

    bypass_mode: bool = False
    rollout_is: str | None = None
    rollout_is_mode: str = "truncate"
    rollout_is_threshold: float = 2.0
    rollout_is_threshold_lower: float | None = None
    rollout_is_batch_normalize: bool = False
    rollout_rs: tuple[str, ...] = ()
    rollout_rs_threshold: tuple[float, ...] = ()
    rollout_rs_threshold_lower: float | None = None
    rollout_rs_ratio: str = "corr"
    veto_threshold: float | None = None

    def __post_init__(self) -> None:
        for name in ("rollout_rs", "rollout_rs_threshold"):  # verl and YAML give lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def rejects(self) -> bool:
        """Whether tokens or responses can be left out."""
        return bool(self.rollout_rs) or self.veto_threshold is not None

    @property
    def lower(self) -> float:
        """The lower bound of a weight, for the modes that have one."""
        given = self.rollout_is_threshold_lower
        return 1 / self.rollout_is_threshold if given is None else given

    @property
    def in_verl(self) -> bool:
        """Whether verl has this weight."""
        return self.rollout_is in ("token", "sequence") and self.rollout_is_mode != "clip"

    @property
    def verl_weight_bounds(self) -> str | float:
        """verl's `rollout_is_threshold`: a number truncates, and LOWER_UPPER sets weights outside to 0 (IcePop).

        `mask` is IcePop with a lower bound that has no effect."""
        upper = self.rollout_is_threshold
        if self.rollout_is_mode == "truncate":
            return upper
        return f"{self.lower if self.rollout_is_mode == 'icepop' else NEVER!r}_{upper!r}"

    @property
    def verl_rejection_bounds(self) -> str:
        """verl's `rollout_rs_threshold`. Bounds of K2 and K3 are in nats, those of K1 are exp(K1): LOWER_UPPER."""
        options, given = self.rollout_rs, self.rollout_rs_threshold
        lower = -LARGEST if self.rollout_rs_threshold_lower is None else self.rollout_rs_threshold_lower
        bounds = []
        for option, upper in zip(options, given * len(options) if len(given) == 1 else given, strict=True):
            ratios = (math.exp(min(max(nats, -LARGEST), LARGEST)) for nats in (lower, upper))
            bounds.append("_".join(map(repr, ratios)) if option.endswith("k1") else repr(upper))
        return ",".join(bounds)


@dataclass(frozen=True)
class Settings:
    """All settings of an objective. Only `kl_loss_coef` (no KL term) and values in `correction` can be None.

    `loss_scale_factor`: the constant by which seq-mean-token-sum-norm divides, in tokens. `tbpo`: bands and cap. Only
    the loss `tbpo` uses them.
    """

    loss: str = "tbpo"
    loss_agg_mode: str = "seq-mean-token-mean"
    clip_ratio_low: float = TOKEN_CLIP[0]
    clip_ratio_high: float = TOKEN_CLIP[1]
    clip_ratio_c: float = NO_DUAL_CLIP
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    mis_imp_ratio_cap: float = 2.0
    kl_loss_coef: float | None = None
    loss_scale_factor: int = 1
    correction: Correction = Correction()
    tbpo: TBPOConfig = field(default_factory=TBPOConfig)

    @property
    def needs_verl(self) -> bool:
        """Whether a function of verl is called."""
        corrected = self.correction.rejects or self.correction.rollout_is is not None
        return self.loss != "tbpo" or corrected or self.kl_loss_coef is not None


def objective_settings(config: Config) -> Settings:
    """Return the settings of a run."""
    actor = config.actor
    low, high = SEQUENCE_CLIP if actor.loss in SEQUENCE_LOSSES else TOKEN_CLIP
    dr_grpo = config.algorithm.adv_estimator == "dr_grpo"
    return Settings(
        loss=actor.loss,
        loss_agg_mode="seq-mean-token-sum-norm" if dr_grpo else actor.loss_agg_mode,
        clip_ratio_low=low if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_ratio_high=high if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c if actor.loss == "dual_clip" else NO_DUAL_CLIP,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        mis_imp_ratio_cap=actor.mis_imp_ratio_cap,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
        loss_scale_factor=config.data.max_response_length,
        correction=Correction(**config.rollout_correction.model_dump()),
        tbpo=tbpo_config(actor),
    )


def tbpo_config(actor: ActorConfig) -> TBPOConfig:
    """Return TBPO's bands and cap."""
    names = {key.name for key in fields(TBPOConfig)} - {"loss_agg_mode"}
    return TBPOConfig(**{name: getattr(actor, name) for name in names})
