"""The sections `actor` and `rollout_correction`: the objective, the update, and corrections for the mismatch.

`ObjectiveKeys` contains keys of the section `actor`. `RolloutCorrectionConfig` is the section `rollout_correction`. A
key that verl has too (`actor.clip_ratio_low`, `algorithm.rollout_correction.rollout_is`) has verl's name. There are
three departures from verl:

- Thresholds of a rejection are in nats for every estimator. verl's thresholds of k1 are ratios.
- `rollout_is_mode` names the mode of a weight. In verl the form of a threshold selects IcePop.
- `rollout_rs_ratio` chooses the ratio of a rejection (arXiv 2605.14220, section 4.2). In verl `bypass_mode` decides.

docs/understand/objectives.md has the formula and the source of every value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from qarl.config.objectives import objective_names
from qarl.config.types import Above, Below, OneOf, Sane, Section, Unit, as_list
from qarl.tbpo.config import BandScaling, MismatchOutsideCap, PositiveBand, TBPOConfig

LossAggMode = Literal[
    "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean"
]
AdvEstimator = Literal["grpo", "rloo", "dr_grpo"]
WeightLevel = Literal["token", "sequence", "geometric"]
WeightMode = Literal["truncate", "clip", "mask", "icepop"]
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
REJECTIONS: tuple[Rejection, ...] = get_args(Rejection)
Rejections = Annotated[list[Rejection], BeforeValidator(as_list)]
Thresholds = Annotated[
    list[Annotated[float, Field(gt=0, le=1e6)]],
    BeforeValidator(lambda value: [value] if isinstance(value, int | float) else value),
]


class ObjectiveKeys(Section):
    """The keys of the section `actor` that choose the objective."""

    loss: Annotated[str, OneOf(objective_names)] = "tbpo"
    """The objective. `tbpo`: QaRL's. `grpo`: PPO's clipped ratio of each token. `dual_clip`: `grpo` with a third bound
    for negative advantages. `gspo`: one clipped ratio per response. `mis_gspo`: `gspo` weighted by the response's
    trainer/rollout ratio, without responses for which this ratio is too large. `positive_only`: `grpo` without negative
    advantages. `sapo`: a soft gate instead of clipping. `reinforce`: no ratio; the advantages are rewards whitened over
    the batch."""

    loss_agg_mode: LossAggMode = "seq-mean-token-mean"
    """How token losses are averaged. tbpo, gspo, mis_gspo and sapo allow only seq-mean-token-mean.
    algorithm.adv_estimator=dr_grpo replaces the default by seq-mean-token-sum-norm and refuses the others."""

    clip_ratio_low: Annotated[Below | None, Sane(1e-6, 0.9)] = None
    """Ratios are clipped at 1 - this value. gspo and mis_gspo clip ratios of responses, other losses those of tokens.
    null means 3e-4 for gspo and mis_gspo, 0.2 for others, as in their papers. tbpo, sapo and reinforce ignore it."""

    clip_ratio_high: Annotated[Above | None, Sane(1e-6, 10.0)] = None
    """Ratios are clipped at 1 + this value. null means 4e-4 for gspo and mis_gspo, 0.2 for other losses."""

    clip_ratio_c: Annotated[float, Sane(1.01, 100.0)] = Field(default=3.0, gt=1, le=1e6)
    """With dual_clip: a token with a negative advantage has no gradient if its ratio is above this value."""

    tau_pos: Annotated[float, Sane(0.01, 100.0)] = Field(default=1.0, gt=0, le=1e3)
    """With sapo: the gate's temperature for positive advantages."""

    tau_neg: Annotated[float, Sane(0.01, 100.0)] = Field(default=1.05, gt=0, le=1e3)
    """With sapo: the gate's temperature for negative advantages. A larger value gives a faster decay."""

    mis_imp_ratio_cap: Annotated[float, Sane(1.0, 100.0)] = Field(default=2.0, gt=0, le=1e6)
    """With mis_gspo: a response has no gradient if its trainer/rollout ratio (the product over its tokens) is above
    this value."""

    use_kl_loss: bool = False
    """Add a KL term to the loss: the divergence of the policy from the weights in model.path. Its gradient is unbiased
    in the first mini-batch of a step, whose responses the policy itself sampled, but not in later ones. The reference
    policy is a second copy of the model in memory, and each step computes its log-probs. With backend=verl, set verl's
    key of this name in the section verl instead."""

    kl_loss_coef: Annotated[Above, Sane(1e-5, 1.0)] = 1e-3
    """With use_kl_loss: the factor of the KL term."""


class RolloutCorrectionConfig(Section):
    """Corrections for the mismatch of trainer and engine, off by default.

    r_corr is the ratio of the trainer's old probability of a token to the rollout's. r_ppo is the ratio of its current
    probability to the rollout's. TBPO already weights the mismatch, so it refuses a second weight.
    """

    bypass_mode: bool = False
    """Clip the ratio of the current probability to the rollout's, instead of its ratio to the trainer's old one. The
    old log-probs are still computed, for the metrics and for r_corr."""

    rollout_is: WeightLevel | None = None
    """The weight of each token's loss. `token`: r_corr of this token. `sequence`: the product of r_corr over the
    response. `geometric`: the geometric mean of r_corr over the response. null means no weight."""

    rollout_is_mode: WeightMode = "truncate"
    """The new value of a weight that is out of bounds. `truncate`: a weight above the upper bound becomes the upper
    bound. `clip`: a weight becomes the nearer bound. `mask`: a weight above the upper bound becomes 0. `icepop`: a
    weight outside the two bounds becomes 0."""

    rollout_is_threshold: Annotated[float, Sane(1.0, 100.0)] = Field(default=2.0, ge=1, le=1e6)
    """The upper bound of a weight, at least 1."""

    rollout_is_threshold_lower: Annotated[Below | None, Sane(1e-6, 1.0)] = None
    """The lower bound of a weight, for clip and icepop. null means 1 / rollout_is_threshold."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the step's batch, after the bounds are applied."""

    rollout_rs: Rejections = []
    """Reject tokens (`token_*`) or responses (`seq_*`) whose divergence is above the threshold. The divergence is
    K1 = -log r, K2 = log(r)^2 / 2 or K3 = r - 1 - log r. For `seq_*` it is the sum, mean or maximum over the response.
    The list may have several entries. Rejected tokens and responses have no gradient, but rejected responses still
    count in the mean's denominator."""

    rollout_rs_threshold: Annotated[Thresholds, Unit("nats")] = []
    """The largest allowed divergence: one value for each entry of rollout_rs, or one value for all entries."""

    rollout_rs_threshold_lower: Annotated[float | None, Unit("nats")] = Field(
        default=None, ge=-1e6, le=1e6
    )
    """The smallest allowed K1, which can be negative. null means that K1 has only an upper threshold."""

    rollout_rs_ratio: Literal["corr", "ppo"] = "corr"
    """The ratio r for rollout_rs: r_corr (the mismatch), or r_ppo (the mismatch and the updates of this step)."""

    veto_threshold: Annotated[float | None, Unit("probability"), Sane(1e-30, 0.1)] = Field(
        default=None, gt=0, lt=1
    )
    """Reject every response with a token whose old probability is below this value, for example 1e-6."""

    @property
    def rejects(self) -> bool:
        """Whether tokens or responses can be left out."""
        return bool(self.rollout_rs) or self.veto_threshold is not None

    @property
    def lower(self) -> float:
        """The lower bound of a weight, for the modes that have one."""
        return self.rollout_is_threshold_lower or 1 / self.rollout_is_threshold


_BAND = Sane(1e-6, 1.0)
_LOWER_BAND = Sane(1e-6, 0.5)


def _tbpo(name: str) -> Any:
    """Return the field of a key of TBPO, with its default and bounds in `TBPOConfig`."""
    key = TBPOConfig.__dataclass_fields__[name]
    return Field(default=key.default, **key.metadata)


class ActorConfig(ObjectiveKeys):
    """The policy update: the objective, batch splits and TBPO's bands.

    The paper's bands suit responses of up to 16384 tokens. A sequence ratio is a geometric mean over tokens, and its
    spread is proportional to 1/sqrt(tokens). So short responses need wider bands. Otherwise most short responses are
    outside the bands and teach nothing.
    """

    ppo_mini_batch_size: Annotated[int, Unit("prompts")] = Field(ge=1)
    """Prompts per optimizer step, as in verl, with rollout.n responses each. Must divide data.train_batch_size."""

    use_dynamic_bsz: bool = False
    """How a batch is split into micro-batches. false: by number of responses (ppo_micro_batch_size_per_gpu). true: by
    number of tokens (ppo_max_token_len_per_gpu), so that a micro-batch of short responses contains more responses."""

    ppo_micro_batch_size_per_gpu: Annotated[int | None, Unit("responses")] = Field(
        default=None, ge=1
    )
    """Responses per forward and backward. This limits memory, and changes the gradient only by rounding. Must divide
    ppo_mini_batch_size * rollout.n. Required if use_dynamic_bsz is false."""

    log_prob_micro_batch_size_per_gpu: Annotated[int | None, Unit("responses")] = Field(
        default=None, ge=1
    )
    """Responses per forward when the old log-probs are computed. This only limits memory. Required if use_dynamic_bsz
    is false."""

    ppo_max_token_len_per_gpu: Annotated[int | None, Unit("tokens")] = Field(default=None, ge=1)
    """Maximum number of tokens (prompts and responses) per forward and backward, if use_dynamic_bsz is true. Must be at
    least data.max_prompt_length + data.max_response_length. This limits memory, and changes the gradient only by
    rounding."""

    log_prob_max_token_len_per_gpu: Annotated[int | None, Unit("tokens")] = Field(
        default=None, ge=1
    )
    """Maximum number of tokens per forward when the old log-probs are computed, if use_dynamic_bsz is true. null means
    the value of ppo_max_token_len_per_gpu. In verl this key is in the section rollout."""

    old_log_probs: Literal["recompute", "rollout", "auto"] = "auto"
    """Where the old log-probs come from. `recompute`: a forward over the batch before the update. `rollout`: the
    rollout's own. `auto`: the rollout's own while they equal the trainer's in every bit, on a GPU up to 1e-5, which
    each step checks (docs/understand/alignment.md), otherwise as `recompute`. With rollout.top_p, rollout.top_k or
    trainer.staleness `auto` always recomputes, and `rollout` is refused."""

    old_log_probs_sample: Annotated[float, Unit("share of the rows"), Sane(0.01, 1.0)] = Field(
        default=0.125, ge=0, le=1
    )
    """With old_log_probs=auto, share of the rows outside the first mini-batch that a step without recomputing checks,
    drawn at random. It is also the probability per step to find one differing row among them. With trainer.staleness,
    share of the rows that are compared with the weights that sampled them."""

    ppo_epochs: Annotated[int, Unit("passes"), Sane(1, 32)] = Field(default=1, ge=1)
    """Passes over the responses of a step."""

    grad_clip: Annotated[float, Sane(1e-4, 1e9)] = Field(default=1.0, gt=0)
    """Largest L2 norm of the whole gradient. A larger gradient is scaled down to it."""

    mask_truncated_responses: bool = False
    """Leave responses that data.max_response_length has cut off out of the loss and its means (DAPO's overlong
    filtering). Their rewards count in the means of their groups. Needs backend=local."""

    seq_clip_ratio_high: Annotated[float, _BAND] = _tbpo("seq_clip_ratio_high")
    """For a positive advantage, a sequence ratio above 1 + this value gives no gradient. The default is the paper's."""

    seq_clip_ratio_low: Annotated[float, _LOWER_BAND] = _tbpo("seq_clip_ratio_low")
    """For a positive advantage with positive_band=two_sided, a sequence ratio below 1 - this value gives no gradient.
    With the default positive_band=upper it has no effect; a run that names it says so.
    The default is the paper's."""

    neg_seq_clip_ratio_low: Annotated[float, _LOWER_BAND] = _tbpo("neg_seq_clip_ratio_low")
    """For a negative advantage, a sequence ratio below 1 - this value gives no gradient. The default is the paper's."""

    neg_seq_clip_ratio_high: Annotated[float, _BAND] = _tbpo("neg_seq_clip_ratio_high")
    """For a negative advantage, a sequence ratio above 1 + this value gives no gradient. The default is the paper's."""

    seq_tis_imp_ratio_cap: Annotated[float, Sane(1, 100)] = _tbpo("seq_tis_imp_ratio_cap")
    """The cap C. A sequence's trainer/rollout weight is limited to [1/C, C], so with C = 1 all weights are 1. The
    default is the paper's."""

    mismatch_outside_cap: MismatchOutsideCap = _tbpo("mismatch_outside_cap")
    """How to treat a sequence with a trainer/rollout weight outside [1/C, C] (seq_tis_imp_ratio_cap). `truncate`: clip
    the weight. `drop`: set the sequence's loss to 0, but still count the sequence in the mean."""

    positive_band: PositiveBand = _tbpo("positive_band")
    """Band for positive advantages. `upper`: only the upper edge, as in the paper's text. `two_sided`: both edges, as
    the paper's table allows."""

    band_scaling: BandScaling = _tbpo("band_scaling")
    """`none`: the bands are as given. `length`: they are given for responses of band_reference_length tokens, and a
    response of T tokens has bands sqrt(band_reference_length / T) times as wide."""

    band_reference_length: Annotated[int, Unit("tokens")] = _tbpo("band_reference_length")
    """Response length for which the bands are given, if band_scaling is length. The default is the paper's longest
    response, to which its bands belong."""
