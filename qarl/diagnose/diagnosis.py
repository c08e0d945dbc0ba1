"""Compare trainer and rollout, and split the difference by cause: the report of `python -m qarl.diagnose`.

One batch is sampled exactly as in training, from the weights in `model.path`. Then several trainers compute its
log-probs. δ is a token's log_prob minus its rollout_log_prob. Each row of the report has one cause of a difference.
Everything else follows the engine as closely as possible:

    quantization   the trainer's linears are BF16, but the engine's are low-bit
    kernel floor   the trainer's linears are as in the engine, but norms, rotary embedding and attention are those of
                   transformers
    staleness      the trainer is one update ahead of the engine (no difference if the first learning rate is 0)
    none           there is no cause. This is the difference that remains at the closest level

The causes do not add up. A table of one response marks the positions at which trainer and engine have different most
likely tokens (as in table 1 of arXiv 2605.14220).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qarl.checkpoint.storage import write_json
from qarl.config import Config
from qarl.config.level import Level
from qarl.kernels.sampling_masks import Truncation
from qarl.metrics.step_metrics import mismatch_metrics
from qarl.metrics.tracker import write_versions
from qarl.schemes import UNQUANTIZED
from qarl.trainer.batch import Batch, index_of, micro_batches
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import prepare_run

_COLUMNS = {"mean |δ|": "abs_mean", "p50": "abs_p50", "p99": "abs_p99", "max": "abs_max"}
_COLUMNS |= {"k1": "k1", "k3": "k3", "ESS": "ess"}
"""Column of the summary -> its metric of `mismatch/`."""


@dataclass(frozen=True)
class Comparison:
    """One trainer compared with the rollout, for B responses of up to R tokens.

    `log_probs`: FP32 [B, R], of this trainer. `top`: int64 [B, R], its most likely tokens."""

    name: str
    level: Level
    log_probs: torch.Tensor
    top: torch.Tensor
    metrics: dict[str, float]


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """Return `config` with other values of `keys` (SECTION.KEY). The values are not checked."""
    for key, value in keys.items():
        section, name = key.split(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def compare(name: str, policy: Policy, batch: Batch, config: Config) -> Comparison:
    """Compute the log-probs of `batch` under `policy`, and the mismatch metrics.

    The flip rate is the share of tokens whose argmax differs from the engine's. With top-p or top-k, each policy keeps
    tokens by its own logits.
    """
    how: dict[str, Any] = {
        "temperature": config.rollout.temperature,
        "truncation": Truncation(config.rollout.top_p, config.rollout.top_k),
    }
    log_probs = torch.zeros_like(batch.rollout_log_probs)
    top = torch.zeros_like(batch.responses)
    with torch.no_grad():
        for rows in micro_batches(batch, config.actor, log_probs=True):
            index = index_of(rows)
            log_probs[index], top[index] = policy.response_log_probs_and_top(batch, rows, **how)
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask)
    if batch.rollout_top_tokens is not None:
        flips = (top != batch.rollout_top_tokens)[batch.response_mask]
        metrics["mismatch/argmax_flip_rate"] = float(flips.float().mean())
    return Comparison(name, policy.align, log_probs, top, metrics)


def split(trainer: LocalTrainer, batch: Batch) -> list[Comparison]:
    """Compare the rollout with the configured trainer, and with one trainer for each cause."""
    config = trainer.config
    bf16 = {"quant.scheme": UNQUANTIZED.name, "quant.align": max(Level)}
    unquantized = Policy.load(with_keys(config, bf16))
    linears = Policy.load(with_keys(config, {"quant.align": Level.LINEARS}))
    comparisons = [compare("as configured", trainer.policy, batch, config)]
    if trainer.policy.scheme.quantized:
        comparisons.append(compare("quantization", unquantized, batch, config))
    comparisons.append(compare("kernel floor", linears, batch, config))
    trainer.replace_policy(Policy.load(with_keys(config, {"quant.align": max(Level)})))
    comparisons.append(compare("none", trainer.policy, batch, config))
    trainer.update(batch, comparisons[-1].log_probs)
    comparisons.append(compare("staleness", trainer.policy, batch, config))
    return comparisons


def summary_table(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as a Markdown table with one row each."""
    lines = [
        "| differs | level | " + " | ".join(_COLUMNS) + " | argmax flips |",
        "|---" * (len(_COLUMNS) + 3) + "|",
    ]
    for row in comparisons:
        cells = [f"{row.metrics[f'mismatch/{name}']:.3g}" for name in _COLUMNS.values()]
        flips = row.metrics.get("mismatch/argmax_flip_rate")
        cells.append("" if flips is None else f"{flips:.2%}")
        lines.append(f"| {row.name} | {row.level} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def response_table(comparison: Comparison, batch: Batch, row: int, tokenizer: Any) -> str:
    """Return a table, one line per token: rollout and trainer log-prob, δ, and `*` if the most likely tokens differ."""
    lines = [f"{'token':>12}  {'rollout':>10}  {'trainer':>10}  {'δ':>10}"]
    for t in batch.response_mask[row].nonzero()[:, 0].tolist():
        token = repr(tokenizer.decode([int(batch.responses[row, t])]))
        rollout = float(batch.rollout_log_probs[row, t])
        ours = float(comparison.log_probs[row, t])
        engines = batch.rollout_top_tokens
        flipped = engines is not None and bool(comparison.top[row, t] != engines[row, t])
        lines.append(
            f"{token:>12}  {rollout:10.5f}  {ours:10.5f}  {ours - rollout:+10.2e}{'  *' if flipped else ''}"
        )
    return "\n".join(lines)


def diagnose(config: Config) -> dict[str, Any]:
    """Sample one training batch, compare, print, and write `diagnose.json` to the run directory. Return its content."""
    parts = prepare_run(config)
    trainer = LocalTrainer(config, parts)
    with trainer.engine:
        trainer.publish()
        batch, _ = trainer.rollout(top_tokens=True)
        comparisons = split(trainer, batch)
    configured = comparisons[0]
    mask = batch.response_mask
    magnitude = (configured.log_probs - batch.rollout_log_probs).abs().masked_fill(~mask, 0)
    means = magnitude.sum(1) / mask.sum(1).clamp(min=1)
    worst = int(means.argmax())
    tokens = int(mask.sum())
    print(
        f"\n{config.quant.scheme}, quant.align={config.quant.align}: {len(batch)} responses, {tokens} tokens\n"
    )
    print(
        f"response {worst}, the one with the largest mean |δ| as configured (* most likely token differs)\n"
    )
    print(response_table(configured, batch, worst, parts.tokenizer))
    print(f"\n{summary_table(comparisons)}")
    report: dict[str, Any] = {"responses": len(batch), "tokens": tokens}
    report["comparisons"] = [
        {"differs": row.name, "level": row.level, **row.metrics} for row in comparisons
    ]
    write_json(config.run_dir / "diagnose.json", report)
    if not (config.run_dir / "versions.json").exists():  # no run has written them
        write_versions(config.run_dir)
    return report
