"""Sampling settings of training responses, and a check that the trainer can compute log-probs for them."""

from __future__ import annotations

from qarl.config import Config
from qarl.errors import UserError
from qarl.kernels.logprob import Truncation, packed_width
from qarl.rollout.engine_config import SamplingConfig, sampling_params

KEPT_GIB = 4.0
"""Memory limit in GiB for the masks of one batch. A mask says which tokens top-p or top-k keep."""


def sampling_config(config: Config, *, top_tokens: bool = False) -> SamplingConfig:
    """Return the sampling settings of training responses."""
    rollout = config.rollout
    return SamplingConfig(
        config.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, top_tokens
    )


def truncation(config: Config) -> Truncation:
    return Truncation(config.rollout.top_p, config.rollout.top_k)


def check_sampling(config: Config, *, level: str, vocabulary: int, confirmed: bool = True) -> None:
    """Raise UserError if the trainer cannot compute log-probs for the engine's sampling, or needs too much memory.

    `level`: the applied alignment level, which may be lower than `quant.align`. `vocabulary`: rows of lm_head.
    `confirmed`: whether a device has confirmed that this level rounds as the engine does.
    """
    sampling_params(sampling_config(config))
    if not truncation(config).active:
        return
    where = f"rollout.top_p={config.rollout.top_p}, rollout.top_k={config.rollout.top_k}"
    if level not in ("model", "exact"):
        raise UserError(
            f"the trainer cannot apply the engine's top-p or top-k at alignment level {level}",
            where=where,
            why=f"quant.align={config.quant.align} fell back to {level}. At this level, the trainer's logits differ "
            "from the engine's, so the trainer would keep different tokens",
            fix="set rollout.top_p=1 and rollout.top_k=-1",
        )
    if not confirmed:
        raise UserError(
            f"the trainer cannot apply the engine's top-p or top-k at the unconfirmed alignment level {level}",
            where=where,
            why=f"no GPU has confirmed that the level {level} rounds as the engine does. If the logits differ, the "
            "trainer would keep different tokens",
            fix="set rollout.top_p=1 and rollout.top_k=-1, or compare the operators with scripts/gpu_check.sh",
        )
    responses = config.data.train_batch_size * config.rollout.n
    gib = responses * config.data.max_response_length * packed_width(vocabulary) / 2**30
    if gib > KEPT_GIB:
        raise UserError(
            f"the sets of tokens that top-p or top-k keep may need {gib:.1f} GiB; the limit is {KEPT_GIB:.0f} GiB",
            where=where,
            why=f"there are {responses} responses of up to {config.data.max_response_length} tokens, and each token "
            f"needs a set of {vocabulary} bits (one per vocabulary entry) until the update is finished",
            fix="set rollout.top_p=1 and rollout.top_k=-1, or lower data.train_batch_size, rollout.n or "
            "data.max_response_length",
        )
