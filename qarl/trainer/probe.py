"""Before training, compare the log-probs that trainer and engine give to a few responses."""

from __future__ import annotations

import dataclasses

import torch

from qarl.checks.sampling import sampling_config
from qarl.metrics.mismatch import mismatch_metrics
from qarl.trainer.batch import make_batch
from qarl.trainer.guard import check_batch
from qarl.trainer.local import LocalTrainer, request_seed

PROBE_RESPONSES = 16
PROBE_TOKENS = 64
"""Number of responses (one per prompt) and tokens per response. They are large enough for a meaningful mean even with
`quant.align=off`, where a single token can differ by several nats."""
PROBE_STEP = -1
"""Training step in the seeds of the probe's requests. No real step has this number."""


def probe(trainer: LocalTrainer) -> str:
    """Sample responses to a few training prompts, and compare the log-probs of trainer and engine. Return one line.

    The state of the global random generators is restored. Raises MismatchError if the mean |δ| is over its limit."""
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
    check_batch(config, trainer.policy.limit_level, batch, metrics, before_first_update=True)
    return f"probe: mean |δ| {metrics['mismatch/abs_mean']:.2g} over {int(batch.response_mask.sum())} tokens"
