"""The sections `actor` and `optim` of the config: the policy update, TBPO's bands, and the optimizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qarl.config.objectives import ObjectiveKeys
from qarl.config.types import LONG, MANY_RESPONSES, Fraction, Sane, Section, Unit
from qarl.tbpo.config import BandScaling, MismatchOutsideCap, PositiveBand, TBPOConfig

_MEMORY = "no micro-batch of that size fits into memory"
_DESTROYED = "the first update would destroy the model"
_UNLEARNED = "nothing would be learned"
_SLOW_MOMENT = "moment would take longer than the run to follow the gradient"
_BAND = Sane(
    1e-6,
    1.0,
    "the band is so wide that it does not limit how far an update moves a sequence's probability",
    "the band is narrower than rounding errors, so almost every response is outside after the first update",
)
_LOWER_BAND = Sane(_BAND.low, 0.5, _BAND.above, _BAND.below)


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

    ppo_mini_batch_size: Annotated[int, Unit("prompts"), Sane(1, 65536, MANY_RESPONSES)] = Field(ge=1)
    """Prompts per optimizer step, as in verl, with rollout.n responses each. Must divide data.train_batch_size."""

    use_dynamic_bsz: bool = False
    """How a batch is split into micro-batches. false: by number of responses (ppo_micro_batch_size_per_gpu). true: by
    number of tokens (ppo_max_token_len_per_gpu), so that a micro-batch of short responses contains more responses."""

    ppo_micro_batch_size_per_gpu: Annotated[int | None, Unit("responses"), Sane(1, 16384, _MEMORY)] = Field(
        default=None, ge=1
    )
    """Responses per forward and backward. This limits memory, and changes the gradient only by rounding. Must divide
    ppo_mini_batch_size * rollout.n. Required if use_dynamic_bsz is false."""

    log_prob_micro_batch_size_per_gpu: Annotated[int | None, Unit("responses"), Sane(1, 65536, _MEMORY)] = Field(
        default=None, ge=1
    )
    """Responses per forward when the old log-probs are computed. This only limits memory. Required if use_dynamic_bsz
    is false."""

    ppo_max_token_len_per_gpu: Annotated[int | None, Unit("tokens"), Sane(1, 2**24, _MEMORY)] = Field(
        default=None, ge=1
    )
    """Maximum number of tokens (prompts and responses) per forward and backward, if use_dynamic_bsz is true. Must be at
    least data.max_prompt_length + data.max_response_length. This limits memory, and changes the gradient only by
    rounding."""

    log_prob_max_token_len_per_gpu: Annotated[int | None, Unit("tokens"), Sane(1, 2**24, _MEMORY)] = Field(
        default=None, ge=1
    )
    """Maximum number of tokens per forward when the old log-probs are computed, if use_dynamic_bsz is true. null means
    the value of ppo_max_token_len_per_gpu. In verl this key is in the section rollout."""

    old_log_probs: Literal["recompute", "rollout", "auto"] = "recompute"
    """Where the old log-probs come from. `recompute`: a forward over the batch before the update. `rollout`: the
    rollout's own. `auto`: the rollout's own while they equal the trainer's in every bit, which each step checks
    (docs/alignment.md), otherwise as `recompute`. Only `recompute` works with rollout.top_p or rollout.top_k."""

    old_log_probs_sample: Annotated[
        float,
        Unit("share of the rows"),
        Sane(0.01, 1.0, "", "a difference outside the first mini-batch is hardly ever found"),
    ] = Field(default=0.125, ge=0, le=1)
    """With old_log_probs=auto, share of the rows outside the first mini-batch that a step without recomputing checks,
    drawn at random. It is also the probability per step to find one differing row among them."""

    ppo_epochs: Annotated[
        int, Unit("passes"), Sane(1, 32, "after that many passes the policy is far from the one that sampled")
    ] = Field(default=1, ge=1)
    """Passes over the responses of a step."""

    grad_clip: Annotated[
        float, Sane(1e-4, 1e9, "even 1e9 clips no gradient", "every gradient is scaled down to almost nothing")
    ] = Field(default=1.0, gt=0)
    """Largest L2 norm of the whole gradient. A larger gradient is scaled down to it."""

    seq_clip_ratio_high: Annotated[float, _BAND] = _tbpo("seq_clip_ratio_high")
    """For a positive advantage, a sequence ratio above 1 + this value gives no gradient. The default is the paper's."""

    seq_clip_ratio_low: Annotated[float, _LOWER_BAND] = _tbpo("seq_clip_ratio_low")
    """For a positive advantage with positive_band=two_sided, a sequence ratio below 1 - this value gives no gradient.
    The default is the paper's."""

    neg_seq_clip_ratio_low: Annotated[float, _LOWER_BAND] = _tbpo("neg_seq_clip_ratio_low")
    """For a negative advantage, a sequence ratio below 1 - this value gives no gradient. The default is the paper's."""

    neg_seq_clip_ratio_high: Annotated[float, _BAND] = _tbpo("neg_seq_clip_ratio_high")
    """For a negative advantage, a sequence ratio above 1 + this value gives no gradient. The default is the paper's."""

    seq_tis_imp_ratio_cap: Annotated[float, Sane(1, 100, "a single sequence could outweigh the rest of the batch")] = (
        _tbpo("seq_tis_imp_ratio_cap")
    )
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

    band_reference_length: Annotated[int, Unit("tokens"), Sane(1, 2**20, LONG)] = _tbpo("band_reference_length")
    """Response length for which the bands are given, if band_scaling is length. The default is the paper's longest
    response, to which its bands belong."""


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices inside the decoder blocks, AdamW for everything else. The paper uses Muon."""

    lr: Annotated[float, Sane(1e-9, 1e-2, _DESTROYED, _UNLEARNED)] = Field(default=1e-6, ge=0)
    """AdamW's peak learning rate. The default is the value that the paper gives for Muon (docs/paper_runs.md)."""

    betas: tuple[
        Annotated[Fraction, Sane(0.0, 0.999, f"the first {_SLOW_MOMENT}")],
        Annotated[Fraction, Sane(0.5, 0.99999, f"the second {_SLOW_MOMENT}", "steps are noisy")],
    ] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's decay rates of the first and second moment."""

    eps: Annotated[
        float,
        Sane(
            1e-20,
            1e-2,
            "it is larger than any gradient, so the weights would hardly move",
            "a division by 0 is possible",
        ),
    ] = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""

    weight_decay: Annotated[float, Sane(0.0, 10.0, "the weights would decay faster than they learn")] = Field(
        default=0.01, ge=0
    )
    """Decoupled weight decay. In each step it is multiplied by the learning rate. The default is the paper's."""

    lr_warmup_steps: Annotated[int, Unit("steps"), Sane(0, 100_000, "the learning rate would never reach its peak")] = (
        Field(default=0, ge=0)
    )
    """Number of training steps in which the learning rate rises linearly from 0 to its peak."""

    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """After the warm-up: `constant`, or `cosine` down to min_lr_ratio at the last training step."""

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the cosine schedule, as a fraction of the peak."""

    muon_lr: Annotated[float, Sane(1e-8, 1.0, _DESTROYED, _UNLEARNED)] = Field(default=0.02, ge=0)
    """Muon's peak learning rate. One update changes an element of a matrix by about muon_lr / sqrt(input width). The
    default is that of the muon-optimizer package, for pre-training. Fine-tuning needs less."""

    muon_momentum: Annotated[
        Fraction, Sane(0.0, 0.999, "the momentum would take longer than the run to follow the gradient")
    ] = 0.95
    """Muon's momentum."""

    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights that the optimizer updates. With bf16, updates are rounded stochastically, because rounding
    to nearest would lose updates of relative size 1e-6."""
