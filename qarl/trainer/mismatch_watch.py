"""Watch the mismatch of a local run's batches, and log a few responses with δ of each token.

Before the first update, a mismatch over the limit of the alignment level ends the run. Later it is a warning.
`qarl.trainer.probe` makes the same check on a few responses before training.
"""

from __future__ import annotations

from typing import Any

from qarl.align.router import known_routing
from qarl.config import Config
from qarl.config.level import Level
from qarl.console import say
from qarl.step.limit import StepLimit
from qarl.step.samples import SampleLog, SampleRows
from qarl.trainer.batch import Batch
from qarl.trainer.old_log_probs import Measured
from qarl.trainer.policy import Policy


def check_batch(
    config: Config,
    level: Level,
    batch: Batch,
    metrics: dict[str, float],
    *,
    before_first_update: bool,
) -> str | None:
    """Return the warning of `check_mismatch` for this batch, or None, also if no token of it was compared.

    `level`: the policy's `limit_level`. Raise MismatchError if the mismatch is over its limit and
    `before_first_update` is true."""
    if "mismatch/abs_mean" not in metrics:
        return None
    lengths = batch.response_mask.sum(1)
    return StepLimit(config.quant.mismatch_limit, level).check(
        metrics["mismatch/abs_mean"],
        response_length=float(lengths[lengths > 0].float().mean()),
        temperature=config.rollout.temperature,
        before_first_update=before_first_update,
    )


def watch(
    config: Config, policy: Policy, batch: Batch, metrics: dict[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Return metrics and warnings of a step. `metrics`: those of the rollout and of its mismatch.

    mismatch/over_limit           1 if the mismatch is over its limit, otherwise 0
    mismatch/outside_kept         with top-p or top-k: number of sampled tokens outside the trainer's sets
    mismatch/other_experts_frac   in a mixture of experts: share of tokens that the trainer's own routers would send to
                                  different experts than the rollout, in at least one layer
    publish/dequantized           1 if the engine multiplies by dequantized weights, otherwise missing
    """
    warning = check_batch(config, policy.limit_level, batch, metrics, before_first_update=False)
    watched = {"mismatch/over_limit": float(warning is not None)}
    warnings = [warning] if warning else []
    if batch.outside is not None:
        watched["mismatch/outside_kept"] = outside = float(batch.outside.sum())
        if outside:
            warnings.append(
                f"{outside:.0f} sampled tokens are outside the set that the trainer's top-p or top-k keeps; the "
                "trainer added them to the set; look at mismatch/abs_max"
            )
    if (
        batch.routed_experts is not None
        and batch.other_experts is not None
        and batch.routing_compared is not None
    ):
        known = known_routing(batch.routed_experts).any(-1) & batch.routing_compared[:, None]
        watched["mismatch/other_experts_frac"] = float(batch.other_experts[known].float().mean())
    if config.quant.kernels.dequantizes:
        watched["publish/dequantized"] = 1.0
    if metrics["rollout/preemptions"]:
        key = "gpu_memory_utilization" if policy.device.type == "cuda" else "cpu_kvcache_space_gib"
        warnings.append(
            f"vLLM interrupted a response and computed it again {metrics['rollout/preemptions']:.0f} times, because "
            f"the KV cache is too small: raise rollout.{key} or lower rollout.max_num_seqs"
        )
    return watched, warnings


def log_step_samples(
    config: Config, step: int, batch: Batch, measured: Measured, tokenizer: Any
) -> None:
    """Append some responses of `step` to samples.jsonl, if `trainer.report` is set and this step is logged.

    `measured`: the trainer's log-probs before the update. Responses that have none are not chosen."""
    if not config.trainer.report:
        return
    log = SampleLog(
        config.run_dir,
        config.trainer.total_training_steps,
        tokenizer.decode,
        warn=lambda text: say(f"warning: {text}"),
    )
    log.write(step, lambda: sample_rows(batch, measured))


def sample_rows(batch: Batch, measured: Measured) -> SampleRows:
    """Return the rows of a batch without their padding."""
    lengths = batch.response_lengths.tolist()
    differences = (measured.log_probs - batch.rollout_log_probs).cpu()
    prompts = []
    responses = []
    deltas: list[list[float]] = []
    for row, length in enumerate(lengths):
        prompts.append(batch.input_ids[row][: batch.prompt_lengths[row]])
        responses.append(batch.responses[row][:length])
        known = bool(measured.known[row])
        deltas.append(differences[row][:length].tolist() if known else [])
    return SampleRows(
        prompts,
        responses,
        deltas,
        advantages=batch.advantages.tolist(),
        rewards=batch.rewards.tolist(),
        finish_reasons=batch.finish_reasons,
        turns=[each.turns for each in batch.conversations] if batch.conversations else None,
    )
