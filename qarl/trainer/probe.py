"""Before training, compare the log-probs that trainer and engine give to a few responses.

Two limits apply (`qarl.metrics.guard`): that of the alignment level, and a multiple of the model's own rounding noise.
The second takes three forwards of the probe's tokens: one with the published tensors, and `qarl.align.noise.DRAWS`.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import torch

from qarl.align.model import engine_arithmetic
from qarl.align.noise import Roots
from qarl.checks.sampling import sampling_config
from qarl.config import Config
from qarl.metrics.guard import NOISE_LIMITS, check_noise, times_noise
from qarl.metrics.mismatch import mismatch_metrics
from qarl.quant.convert import published_forward
from qarl.quant.expert_names import stacked_experts
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.guard import check_batch
from qarl.trainer.local import LocalTrainer, request_seed
from qarl.trainer.packing import micro_batches
from qarl.trainer.policy import Policy

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
    found = compare(trainer)
    check(trainer, found)
    line = f"probe: mean |δ| {found.metrics['mismatch/abs_mean']:.2g} over {found.tokens:.0f} tokens"
    if found.times is None:
        return line
    return f"{line}; with the published weights, |δ| at {found.level} is {found.times:.2g} times this model's noise"


def check(trainer: LocalTrainer, found: Comparison) -> None:
    """Raise MismatchError if the |δ| of a comparison is over one of its limits."""
    check_batch(trainer.config, trainer.policy.limit_level, found.batch, found.metrics, before_first_update=True)
    if found.times is not None:
        check_noise(found.times, level=found.level, tokens=found.tokens)


def compare(trainer: LocalTrainer) -> Comparison:
    """Sample responses to a few training prompts, and compare the log-probs of trainer and engine.

    The noise is measured unless `quant.mismatch_limit` is set, which replaces its limit, or the level has none."""
    config = trainer.config
    count = min(PROBE_RESPONSES, len(trainer.parts.train_prompts))
    seeds = [request_seed(config.seed, PROBE_STEP, i) for i in range(count)]
    prompts = [trainer.parts.train_prompts[i].prompt_token_ids for i in range(count)]
    tokens = min(PROBE_TOKENS, config.data.max_response_length)
    sampling = dataclasses.replace(sampling_config(config), max_tokens=tokens)
    on_gpu = trainer.policy.device.type == "cuda"
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        responses = trainer.generate(prompts, sampling, seeds)
        trainer.engine.sleep()
        zeros = torch.zeros(count)
        batch = make_batch(responses, zeros, zeros, pad_token_id=trainer.parts.pad_token_id).to(trainer.policy.device)
        log_probs = trainer.old_log_probs(batch)
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask)
    found = Comparison(batch, metrics, None, trainer.policy.limit_level, float(batch.response_mask.sum()))
    if config.quant.mismatch_limit is None and found.level in NOISE_LIMITS:
        found.level, roots = compare_with_noise(trainer.policy, config, batch)
        found.times = times_noise(roots.delta, roots.noise, roots.tokens)
    return found


def compare_with_noise(policy: Policy, config: Config, batch: Batch) -> tuple[str, Roots]:
    """Compare the engine's log-probs of `batch` with the closest forward that `policy` has. Return its level, too.

    The forward multiplies by the published tensors, also at `off`. It has the arithmetic of level `model` where that
    exists, also at `linears` and, without experts, at `off`."""
    off = policy.align == "off" and policy.scheme.quantized

    def log_probs() -> torch.Tensor:
        found = torch.zeros_like(batch.rollout_log_probs)
        for rows in micro_batches(batch, config.actor, log_probs=True):
            found[rows] = policy.response_log_probs(batch, rows, temperature=config.rollout.temperature)
        return found

    level, roots = policy.limit_level, Roots()
    with ExitStack() as stack:
        if level in ("off", "linears") and not (off and stacked_experts(policy.model)):
            level = "model" if stack.enter_context(engine_arithmetic(policy.model)) else level
        if off:
            kernels = config.quant.kernels
            stack.enter_context(published_forward(policy.model, policy.scheme, policy.ignore, kernels=kernels))
        roots.add(policy.model, log_probs, batch.rollout_log_probs, batch.response_mask)
    return level, roots
