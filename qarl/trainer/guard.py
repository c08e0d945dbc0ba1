"""Check every step of a local run. Warn about a large mismatch, tokens outside top-p or top-k, and preemptions."""

from __future__ import annotations

from qarl.align.router_replay import known_routing
from qarl.config import Config
from qarl.metrics.guard import check_mismatch
from qarl.trainer.batch import Batch


def check_batch(
    config: Config, level: str, batch: Batch, metrics: dict[str, float], *, before_first_update: bool
) -> str | None:
    """Return the warning of `check_mismatch` for this batch, or None. `level`: the policy's `limit_level`."""
    lengths = batch.response_mask.sum(1)
    return check_mismatch(
        metrics["mismatch/abs_mean"],
        limit=config.quant.mismatch_limit,
        level=level,
        before_first_update=before_first_update,
        response_length=float(lengths[lengths > 0].float().mean()),
        temperature=config.rollout.temperature,
    )


def watch(
    config: Config, level: str, batch: Batch, metrics: dict[str, float], *, before_first_update: bool, on_gpu: bool
) -> tuple[dict[str, float], list[str]]:
    """Return metrics and warnings of a step, before its update:

        mismatch/over_limit           1 if the mismatch is over its limit, otherwise 0
        mismatch/outside_kept         with top-p or top-k: number of sampled tokens outside the trainer's kept sets
        mismatch/other_experts_frac   in a mixture of experts: share of tokens that the trainer's own routers would send
                                      to different experts than the rollout, in at least one layer

    Raises:
        MismatchError: the mismatch is over its limit and nothing has been trained since the program started.
    """
    warning = check_batch(config, level, batch, metrics, before_first_update=before_first_update)
    found, warnings = {"mismatch/over_limit": float(warning is not None)}, [warning] if warning else []
    if batch.outside is not None:
        found["mismatch/outside_kept"] = outside = float(batch.outside.sum())
        if outside:
            warnings.append(
                f"{outside:.0f} sampled tokens are outside the set that the trainer's top-p or top-k keeps; the "
                "trainer added them to the set; look at mismatch/abs_max"
            )
    if batch.routed_experts is not None and batch.other_experts is not None:
        known = known_routing(batch.routed_experts).any(-1)
        found["mismatch/other_experts_frac"] = float(batch.other_experts[known].float().mean())
    if metrics["rollout/preemptions"]:
        key = "gpu_memory_utilization" if on_gpu else "cpu_kvcache_space_gib"
        warnings.append(
            f"vLLM interrupted a response and computed it again {metrics['rollout/preemptions']:.0f} times, because "
            f"the KV cache is too small: raise rollout.{key} or lower rollout.max_num_seqs"
        )
    return found, warnings
