"""Keys of verl that do not go with its trainer `separate_async` as QaRL runs it, `qarl_separate_async`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from qarl.verl.keys import MODEL, QUANT, ROLLOUT, SAMPLER, SEPARATE_MODE, SHARDS
from qarl.verl.refusals import Conflict

NOT_RUN = "QaRL has not run it with engines of their own"
ON_HOST = (
    "verl's copy of weights on the host is these weights, so the next update would change the copy"
)
NO_CRITIC = "QaRL has no critic beside engines of their own"
NEEDED: dict[str, tuple[Any, str]] = {
    "actor_rollout_ref.hybrid_engine": (
        False,
        "an engine on the trainer's GPUs would sample from weights that QaRL has not published",
    ),
    f"{ROLLOUT}.checkpoint_engine.backend": (
        "qarl",
        "verl's backends send BF16 tensors, which the engine's quantized layers do not take",
    ),
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module": (
        "qarl.verl.publish",
        "it registers the backend qarl",
    ),
    f"{ROLLOUT}.free_cache_engine": (
        False,
        "an engine that sleeps loses the weights to which the next publish sends the changes",
    ),
    f"{SAMPLER}.custom_sampler.name": (
        "StalePromptReplayBuffer",
        "verl's own sampler takes a group with failed responses for a complete one",
    ),
    f"{SHARDS}.param_offload": (False, ON_HOST),
    f"{SHARDS}.reshard_after_forward": (
        True,
        "verl restores the weights before the step, and what is gathered would still be of others",
    ),
    "trainer.nnodes": (1, NOT_RUN),
    f"{ROLLOUT}.nnodes": (1, NOT_RUN),
    f"{ROLLOUT}.tensor_model_parallel_size": (1, NOT_RUN),
    f"{ROLLOUT}.pipeline_model_parallel_size": (1, NOT_RUN),
    f"{ROLLOUT}.data_parallel_size": (1, NOT_RUN),
    f"{MODEL}.lora_rank": (0, NOT_RUN),
    f"{QUANT}.lora.r": (0, "adapters cannot be published to engines of their own"),
    f"{QUANT}.old_log_probs": ("recompute", "the rollout's log-probs are those of older weights"),
    "critic.enable": (False, NO_CRITIC),
    "actor_rollout_ref.actor.use_kl_loss": (False, NOT_RUN),
    "algorithm.use_kl_in_reward": (False, NOT_RUN),
    "algorithm.filter_groups.enable": (False, NOT_RUN),
    "reward.reward_model.enable": (False, NOT_RUN),
    "algorithm.rollout_correction.bypass_mode": (
        False,
        "it replaces the trainer's log-probs by the rollout's, which are those of older weights",
    ),
}
"""Key -> the value that it must have if it is there, and why."""
NOT_NULL = (
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
    f"{SAMPLER}.custom_sampler.name",
    f"{QUANT}.old_log_probs",
)
"""Those of `NEEDED` whose value is not the needed one if they are null or missing."""


def separate_conflicts(composed: Any) -> Iterator[Conflict]:
    """Yield the keys of verl's config `composed` that its trainer does not go with."""
    staleness = OmegaConf.select(composed, f"{QUANT}.staleness") or 0
    if composed.trainer.v1.trainer_mode != SEPARATE_MODE:
        if staleness:
            why = (
                f"the engine waits for each update, unless trainer.v1.trainer_mode={SEPARATE_MODE}"
            )
            yield Conflict(f"{QUANT}.staleness", staleness, 0, why)
        return
    for key, (good, why) in NEEDED.items():
        value = OmegaConf.select(composed, key)
        if value != good and (value is not None or key in NOT_NULL):
            yield Conflict(key, value, good, why)
    if composed.algorithm.adv_estimator == "gae":
        yield Conflict("algorithm.adv_estimator", "gae", "grpo or rloo", NO_CRITIC)
    threshold = composed.trainer.v1.sampler.max_off_policy_threshold
    if threshold is None or threshold < 2 or staleness != threshold - 1:
        why = f"it bounds the age of a response, and {QUANT}.staleness={staleness} says how many versions are kept"
        key = f"{SAMPLER}.max_off_policy_threshold"
        yield Conflict(key, threshold, f"{QUANT}.staleness + 1, and that to 1 or more", why)
