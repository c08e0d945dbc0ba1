"""The probe: before training, sample a few responses and compare the log-probs that trainer and engine give to them.

Two limits apply (`qarl.metrics.mismatch_limit`): that of the alignment level, and a multiple of the model's own
rounding noise (`qarl.step.noise`).
"""

from __future__ import annotations

import dataclasses

import torch

from qarl.metrics.step_metrics import mismatch_metrics
from qarl.rollout.engine_config import SamplingConfig
from qarl.step.noise import RESPONSES, NoiseComparison, compare_with_noise, has_noise_limit
from qarl.trainer.batch import Batch, make_batch, request_seed
from qarl.trainer.local import LocalTrainer
from qarl.trainer.mismatch_watch import check_batch
from qarl.trainer.sampled_from import leave_out_early_ends

PROBE_TOKENS = 64
"""Number of tokens per response, of which there is one for each prompt. With `RESPONSES` they are enough for a
meaningful mean even with `quant.align=off`, where a single token can differ by several nats."""
PROBE_STEP = -1
"""Training step in the seeds of the probe's requests. No real step has this number."""


@dataclasses.dataclass
class Comparison:
    """A comparison of trainer and engine: the `batch` of responses, and `metrics` of their mismatch.

    tokens  number of compared tokens
    noise   |δ| with the published tensors beside the rounding noise, or None if the noise limits nothing
    """

    batch: Batch
    metrics: dict[str, float]
    tokens: float
    noise: NoiseComparison | None = None


def probe(trainer: LocalTrainer) -> str:
    """Sample responses to a few training prompts, and compare the log-probs of trainer and engine. Return one line.

    The state of the global random generators is restored. Raises MismatchError if |δ| is over one of its limits."""
    comparison = compare(trainer)
    check(trainer, comparison)
    line = f"probe: mean |δ| {comparison.metrics['mismatch/abs_mean']:.2g} over {comparison.tokens:.0f} tokens"
    noise = comparison.noise
    if noise is None:
        return line
    ratio = f"|δ| at {noise.level} is {noise.times:.2g} times this model's noise"
    return f"{line}; with the published weights, {ratio}"


def check(trainer: LocalTrainer, comparison: Comparison) -> None:
    """Raise MismatchError if the |δ| of a comparison is over one of its limits."""
    level = trainer.policy.limit_level
    batch = comparison.batch
    metrics = comparison.metrics
    check_batch(trainer.config, level, batch, metrics, before_first_update=True)
    if comparison.noise is not None:
        comparison.noise.check()


def compare(trainer: LocalTrainer) -> Comparison:
    """Sample responses to a few training prompts, and compare the log-probs of trainer and engine.

    The noise is measured unless `quant.mismatch_limit` is set, which replaces its limit, or the level has none."""
    config = trainer.config
    count = min(RESPONSES, len(trainer.parts.train_prompts))
    seeds = [request_seed(config.seed, PROBE_STEP, i) for i in range(count)]
    prompts = [trainer.parts.train_prompts[i].prompt_token_ids for i in range(count)]
    longest = min(PROBE_TOKENS, config.data.max_response_length)
    sampling = dataclasses.replace(SamplingConfig.of_run(config), max_tokens=longest)
    on_gpu = trainer.policy.device.type == "cuda"
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        responses = trainer.generate(prompts, sampling, seeds)
        trainer.engine.sleep()
        zeros = torch.zeros(count)
        batch = make_batch(responses, zeros, zeros, pad_token_id=trainer.parts.pad_token_id)
        if config.rollout.min_tokens:
            leave_out_early_ends(batch, config.rollout.min_tokens, trainer.parts.ends)
        batch = batch.to(trainer.policy.device)
        log_probs = trainer.old_log_probs(batch)
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask)
    level = trainer.policy.limit_level
    tokens = float(batch.response_mask.sum())
    if not has_noise_limit(level, config.quant.mismatch_limit):
        return Comparison(batch, metrics, tokens)
    noise = compare_with_noise(
        trainer.policy.in_comparison(),
        lambda: trainer.policy.batch_log_probs(batch, config),
        batch.rollout_log_probs,
        batch.response_mask,
    )
    return Comparison(batch, metrics, tokens, noise)
