"""Compare the log-probs that trainer and engine give to the same tokens: before training (the probe) and in every step.

Two limits apply to the probe (`qarl.metrics.mismatch_limit`): that of the alignment level, and a multiple of the
model's own rounding noise. The second takes three forwards of the probe's tokens: one with the published tensors, and
`qarl.align.rounding_noise.DRAWS`. Steps have only the first limit. Before the first update, a mismatch over it ends the
run. Later it is a warning.

`log_samples` writes the tokens of a few responses with their differences, for the report.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from qarl.align.levels import engine_arithmetic
from qarl.align.rounding_noise import Roots
from qarl.align.router import known_routing
from qarl.config import Config
from qarl.console import say
from qarl.errors import UserError
from qarl.metrics.mismatch_limit import NOISE_LIMITS, check_mismatch, check_noise, times_noise
from qarl.metrics.step_metrics import mismatch_metrics
from qarl.quant.convert import published_forward
from qarl.quant.experts import stacked_experts
from qarl.report.samples import append_samples, chosen_samples, is_logged
from qarl.rollout.engine_config import SamplingConfig
from qarl.trainer.batch import Batch, make_batch, request_seed
from qarl.trainer.old_log_probs import Measured
from qarl.trainer.policy import Policy

if TYPE_CHECKING:
    from qarl.trainer.local import LocalTrainer

PROBE_RESPONSES = 16
PROBE_TOKENS = 64
"""Number of responses (one per prompt) and tokens per response. They are large enough for a meaningful mean even with
`quant.align=off`, where a single token can differ by several nats."""
PROBE_STEP = -1
"""Training step in the seeds of the probe's requests. No real step has this number."""


@dataclasses.dataclass
class Comparison:
    """A comparison of trainer and engine: the `batch` of responses, and `metrics` of their mismatch.

    times   how many times larger |δ| is than the rounding noise, with the published tensors; None if not measured
    level   the alignment level whose arithmetic the trainer had for `times`
    tokens  number of compared tokens
    """

    batch: Batch
    metrics: dict[str, float]
    times: float | None
    level: str
    tokens: float


def probe(trainer: LocalTrainer) -> str:
    """Sample responses to a few training prompts, and compare the log-probs of trainer and engine. Return one line.

    The state of the global random generators is restored. Raises MismatchError if |δ| is over one of its limits."""
    comparison = compare(trainer)
    check(trainer, comparison)
    line = f"probe: mean |δ| {comparison.metrics['mismatch/abs_mean']:.2g} over {comparison.tokens:.0f} tokens"
    if comparison.times is None:
        return line
    ratio = f"|δ| at {comparison.level} is {comparison.times:.2g} times this model's noise"
    return f"{line}; with the published weights, {ratio}"


def check(trainer: LocalTrainer, comparison: Comparison) -> None:
    """Raise MismatchError if the |δ| of a comparison is over one of its limits."""
    level = trainer.policy.limit_level
    batch = comparison.batch
    metrics = comparison.metrics
    check_batch(trainer.config, level, batch, metrics, before_first_update=True)
    if comparison.times is not None:
        check_noise(comparison.times, level=comparison.level, tokens=comparison.tokens)


def compare(trainer: LocalTrainer) -> Comparison:
    """Sample responses to a few training prompts, and compare the log-probs of trainer and engine.

    The noise is measured unless `quant.mismatch_limit` is set, which replaces its limit, or the level has none."""
    config = trainer.config
    count = min(PROBE_RESPONSES, len(trainer.parts.train_prompts))
    seeds = [request_seed(config.seed, PROBE_STEP, i) for i in range(count)]
    prompts = [trainer.parts.train_prompts[i].prompt_token_ids for i in range(count)]
    longest = min(PROBE_TOKENS, config.data.max_response_length)
    sampling = dataclasses.replace(SamplingConfig.of_run(config), max_tokens=longest)
    on_gpu = trainer.policy.device.type == "cuda"
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        responses = trainer.generate(prompts, sampling, seeds)
        trainer.engine.sleep()
        zeros = torch.zeros(count)
        batch = make_batch(responses, zeros, zeros, pad_token_id=trainer.parts.pad_token_id).to(
            trainer.policy.device
        )
        log_probs = trainer.old_log_probs(batch)
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask)
    level = trainer.policy.limit_level
    tokens = float(batch.response_mask.sum())
    if config.quant.mismatch_limit is not None or level not in NOISE_LIMITS:
        return Comparison(batch, metrics, None, level, tokens)
    level, roots = compare_with_noise(trainer.policy, config, batch)
    return Comparison(
        batch, metrics, times_noise(roots.delta, roots.noise, roots.tokens), level, tokens
    )


def compare_with_noise(policy: Policy, config: Config, batch: Batch) -> tuple[str, Roots]:
    """Compare the engine's log-probs of `batch` with the closest forward that `policy` has. Return its level, too.

    The forward multiplies by the published tensors, also at `off`. It has the arithmetic of level `model` where that
    exists, also at `linears` and, without experts, at `off`."""
    off = policy.align == "off" and policy.scheme.quantized
    level = policy.limit_level
    roots = Roots()
    with ExitStack() as stack:
        if level in ("off", "linears") and not (off and stacked_experts(policy.model)):
            level = "model" if stack.enter_context(engine_arithmetic(policy.model)) else level
        if off:
            kernels = config.quant.kernels
            stack.enter_context(
                published_forward(policy.model, policy.scheme, policy.ignore, kernels=kernels)
            )
        roots.add(
            policy.model,
            lambda: policy.batch_log_probs(batch, config),
            batch.rollout_log_probs,
            batch.response_mask,
        )
    return level, roots


def check_batch(
    config: Config,
    level: str,
    batch: Batch,
    metrics: dict[str, float],
    *,
    before_first_update: bool,
) -> str | None:
    """Return the warning of `check_mismatch` for this batch, or None. `level`: the policy's `limit_level`.

    Raise MismatchError if the mismatch is over its limit and `before_first_update` is true."""
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
    if config.quant.kernels == "dequantized":
        watched["publish/dequantized"] = 1.0
    if metrics["rollout/preemptions"]:
        key = "gpu_memory_utilization" if policy.device.type == "cuda" else "cpu_kvcache_space_gib"
        warnings.append(
            f"vLLM interrupted a response and computed it again {metrics['rollout/preemptions']:.0f} times, because "
            f"the KV cache is too small: raise rollout.{key} or lower rollout.max_num_seqs"
        )
    return watched, warnings


def log_samples(
    config: Config, step: int, batch: Batch, measured: Measured, tokenizer: Any
) -> None:
    """Append some responses of `step` to samples.jsonl, if `is_logged` chooses this step.

    `measured`: the trainer's log-probs before the update. Responses that have none are not chosen."""
    if not config.trainer.report or not is_logged(step, config.trainer.total_training_steps):
        return
    lengths = batch.response_mask.sum(1).tolist()
    differences = (measured.log_probs - batch.rollout_log_probs).cpu()
    deltas = [
        row[:length].tolist() if known else []
        for row, length, known in zip(differences, lengths, measured.known.tolist(), strict=True)
    ]
    prompts = [
        row[:length]
        for row, length in zip(batch.input_ids, batch.prompt_lengths.tolist(), strict=True)
    ]
    responses = [row[:length] for row, length in zip(batch.responses, lengths, strict=True)]
    more: dict[str, Any] = {"reward": batch.rewards.tolist()}
    if batch.finish_reasons is not None:
        more["finish_reason"] = batch.finish_reasons
    advantages = batch.advantages.tolist()
    samples = chosen_samples(step, prompts, responses, deltas, advantages, tokenizer.decode, **more)
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        append_samples(config.run_dir, samples)
    except (UserError, OSError) as error:
        say(f"warning: the samples of step {step} were not written: {error}")
