"""What watches over a local run: that trainer and engine sample from one distribution, before and while it trains.

    check_sampling   before the engine starts: values that vLLM would change, kept sets that do not fit
    probe            after the first publish: a few responses, log-probs of both sides compared
    watch            every step: the mismatch against its limit, tokens outside of the kept set, preemptions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qarl.config import Config
from qarl.errors import UserError
from qarl.kernels.kept import Truncation, packed_width
from qarl.metrics.guard import check_mismatch
from qarl.metrics.mismatch import mismatch_metrics
from qarl.rollout.engine import SamplingConfig, sampling_params
from qarl.trainer.batch import Batch, make_batch

if TYPE_CHECKING:
    from qarl.trainer.local import LocalTrainer

KEPT_GIB = 4.0
"""Most memory for the kept sets of one batch."""
PROBE_RESPONSES, PROBE_TOKENS = 16, 64
"""Prompts of the probe, one response each, and its length: at `off` a single token may be off by several nats, so a
mean over few of them would say nothing."""
PROBE_STEP = -1
"""In the place of a training step in the seed of its requests."""


def sampling_config(config: Config, *, top_tokens: bool = False) -> SamplingConfig:
    """How training responses are sampled."""
    rollout = config.rollout
    return SamplingConfig(
        config.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, top_tokens
    )


def truncation(config: Config) -> Truncation:
    return Truncation(config.rollout.top_p, config.rollout.top_k)


def check_sampling(config: Config, *, level: str, vocabulary: int) -> None:
    """UserError for sampling that the trainer's log-probs would not describe.

    Args:
        level: the alignment level that is applied, which may be lower than the one asked for.
        vocabulary: entries of lm_head.
    """
    sampling_params(sampling_config(config))
    if not truncation(config).active:
        return
    where = f"rollout.top_p={config.rollout.top_p}, rollout.top_k={config.rollout.top_k}"
    if level not in ("model", "exact"):
        raise UserError(
            "the trainer cannot follow the engine's top-p or top-k here",
            where=where,
            why=f"quant.align={config.quant.align} fell back to {level}, whose logits are not the engine's: it would "
            "keep other tokens",
            fix="set rollout.top_p=1 and rollout.top_k=-1",
        )
    responses = config.data.train_batch_size * config.rollout.n
    gib = responses * config.data.max_response_length * packed_width(vocabulary) / 2**30
    if gib > KEPT_GIB:
        raise UserError(
            f"the tokens that top-p or top-k keep may take {gib:.1f} GiB, and {KEPT_GIB:.0f} are allowed",
            where=where,
            why=f"{responses} responses of up to {config.data.max_response_length} tokens, each with one bit for every "
            f"one of {vocabulary} tokens of the vocabulary: the sets stay fixed for the whole update",
            fix="set rollout.top_p=1 and rollout.top_k=-1, or lower data.train_batch_size, rollout.n or "
            "data.max_response_length",
        )


def probe(trainer: LocalTrainer, seeds: Sequence[int]) -> str:
    """Sample a few training prompts, one for each of `seeds`, and compare the log-probs of both sides, before anything
    is trained.

    The global generators are left as they were. The text says what was found.

    Raises:
        MismatchError: the mean |δ| is over its limit.
    """
    config = trainer.config
    count = min(len(seeds), len(trainer.parts.train_prompts))
    prompts = [trainer.parts.train_prompts[i].prompt_token_ids for i in range(count)]
    tokens = min(PROBE_TOKENS, config.data.max_response_length)
    sampling = dataclasses.replace(sampling_config(config), max_tokens=tokens)
    on_gpu = trainer.policy.device.type == "cuda"
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        responses = trainer.generate(prompts, sampling, list(seeds[:count]))
        zeros = torch.zeros(count)
        batch = make_batch(responses, zeros, zeros, pad_token_id=trainer.parts.pad_token_id).to(trainer.policy.device)
        log_probs = trainer.old_log_probs(batch)
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask)
    check_batch(trainer, batch, metrics, before_first_update=True)
    return f"probe: mean |δ| {metrics['mismatch/abs_mean']:.2g} over {int(batch.response_mask.sum())} tokens"


def check_batch(
    trainer: LocalTrainer, batch: Batch, metrics: dict[str, float], *, before_first_update: bool
) -> str | None:
    """`check_mismatch` of a batch with these metrics."""
    lengths = batch.response_mask.sum(1)
    return check_mismatch(
        metrics["mismatch/abs_mean"],
        limit=trainer.config.quant.mismatch_limit,
        level=trainer.policy.align,
        before_first_update=before_first_update,
        response_length=float(lengths[lengths > 0].float().mean()),
    )


def watch(trainer: LocalTrainer, batch: Batch, metrics: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Metrics and warnings of a step whose update has not begun: `mismatch/over_limit` (0 or 1), and with top-p or
    top-k `mismatch/outside_kept`, the sampled tokens outside of the trainer's kept sets.

    Raises:
        MismatchError: the mismatch is over its limit and nothing has been trained since the program started.
    """
    warning = check_batch(trainer, batch, metrics, before_first_update=not trainer.updated)
    found, warnings = {"mismatch/over_limit": float(warning is not None)}, [warning] if warning else []
    if batch.outside is not None:
        found["mismatch/outside_kept"] = outside = float(batch.outside.sum())
        if outside:
            warnings.append(
                f"{outside:.0f} sampled tokens are outside of what the trainer's top-p or top-k keeps, and were kept: "
                "look at mismatch/abs_max"
            )
    if metrics["rollout/preemptions"]:
        key = "gpu_memory_utilization" if trainer.policy.device.type == "cuda" else "cpu_kvcache_space_gib"
        warnings.append(
            f"{metrics['rollout/preemptions']:.0f} times a response was put off and computed again, because the KV "
            f"cache is too small: raise rollout.{key} or lower rollout.max_num_seqs"
        )
    return found, warnings
