"""Compare corrections of `quant.align=off` with the truth: `python -m qarl.diagnose calibrate`.

The truth is the gradient of the same objective, on the same responses, at `quant.align=exact`. Its trainer computes
with the engine's low-bit weights and kernels, so δ is 0 and there is nothing to correct. It is the policy gradient of
the policy that sampled and that will be used. A trainer at `off` follows another policy, whose improvements need not
appear in the engine (arXiv 2605.14220, section 4.1, "Why bypass also fails"). Miles' notes say the same: the rollout's
log-probs are the authoritative ones.

arXiv 2605.14220 (VeXact) removes the mismatch on the other side: it replaces the engine. The truth would then be the
gradient over responses of a BF16 engine. These are other responses, and two batches differ by far more than two
thresholds do (`between_batches` of the report). The same responses on both sides have no such noise. An importance
weight aims at that other truth: it makes the mean over the engine's samples the BF16 policy's mean. So a weight that
moves the gradient away from `exact` is not wrong, but it does not bring back what `exact` does.

Two comparisons are made for each batch:

    corrections   caps, weights and rejections, at the weights that sampled. Every ratio to the old policy is 1.
    bands         at weights that the `exact` trainer has moved by one optimizer step on the first mini-batch, on the
                  other rows. The truth has the configured bands.

A KL term (`actor.use_kl_loss`) is left out, because corrections do not act on it.

Weights are those of `model.path`, which may be a checkpoint of a run (RUN/checkpoints/step_N).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from qarl.config import Config
from qarl.console import say
from qarl.diagnose.candidates import (
    LEVELS,
    Candidate,
    bands,
    base_config,
    check_memory,
    clipped_share,
    corrections,
    with_keys,
)
from qarl.diagnose.diagnosis import write_report
from qarl.diagnose.gradients import Closeness, closeness, objective_gradients, spread
from qarl.errors import UserError
from qarl.metrics.step_metrics import mismatch_metrics
from qarl.objectives import verl_losses
from qarl.objectives.settings import Settings, objective_settings
from qarl.trainer.batch import Batch
from qarl.trainer.checkpoints import forward_weights
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import prepare_run

FEWEST_BATCHES = 4
FALSE_FINDINGS = 0.025
"""The probability that a kind without any gain is called closer to the truth, over all its candidates."""
Weights = dict[str, torch.Tensor]


@dataclass
class Row:
    """A candidate (or an alignment level) and its closeness to the truth in each batch."""

    kind: str
    name: str
    keys: str
    close: list[Closeness] = field(default_factory=list)
    silent: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    total: torch.Tensor | float = 0.0

    def report(self, base: Row, truth: Any) -> dict[str, Any]:
        """Return the row of the report. `base`: the row without correction. `truth`: the sum over the batches."""
        gain = [mine.cosine - other.cosine for mine, other in zip(self.close, base.close, strict=True)]
        return {
            "kind": self.kind,
            "name": self.name,
            "keys": self.keys,
            "batches": len(self.close),
            "cosine": spread([close.cosine for close in self.close]),
            "relative_error": spread([close.error for close in self.close]),
            "relative_norm": spread([close.norm for close in self.close]),
            "relative_error_of_the_mean_gradient": closeness(torch.as_tensor(self.total), truth).error,
            "cosine_gain": spread(gain),
            "closer_in_batches": sum(value > 0 for value in gain),
            "responses_without_gradient": fmean(self.silent),
            "tokens_with_clipped_weight": fmean(self.clipped),
        }


@dataclass
class Moved:
    """The state after one update of the `exact` trainer. `truth`: its gradient over the rows from `start`, [P]."""

    weights: Weights
    truth: torch.Tensor
    start: int


@dataclass
class Truth:
    """A batch that has a gradient: its `gradient` at `exact`, [P], and the state after an update on it, if any."""

    batch: Batch
    gradient: torch.Tensor
    moved: Moved | None


def calibrate(config: Config, *, batches: int = 6) -> dict[str, Any]:
    """Sample `batches` batches, compare, print, and write `calibrate.json` to the run directory. Return its content.

    Raise UserError if the memory may be too small, if the model does not reach `exact`, or if fewer than four batches
    have a gradient."""
    if config.model.dtype == "fp16":
        why = "they need a loss scale, and a run finds it only during its steps"
        fix = "set model.dtype=bf16"
        raise UserError("gradients of FP16 models are not compared", where="model.dtype=fp16", why=why, fix=fix)
    verl_losses.require(Settings(loss="grpo"))
    without_kl = config.actor.use_kl_loss
    config = with_keys(config, {"quant.align": "exact", "optim.lr_warmup_steps": 0, "actor.use_kl_loss": False})
    check_memory(config, batches)
    trainer, sampled = _sample(config, batches)
    start = copy_weights(trainer.policy)
    at_exact = [_mismatch(trainer, batch) for batch in sampled]
    truths = _truths(trainer, sampled, start)
    rows, band_rows, off = _compare(trainer, truths, start)
    tables = {
        "corrections": _reports(rows, sum(truth.gradient for truth in truths)),
        "bands": _reports(band_rows, sum(truth.moved.truth for truth in truths if truth.moved)),
    }
    report = {
        "scheme": config.quant.scheme,
        "loss": config.actor.loss,
        "kl_term_left_out": without_kl,
        "model": config.model.path,
        "batches": len(truths),
        "responses": sum(len(truth.batch) for truth in truths),
        "tokens": sum(int(truth.batch.response_mask.sum()) for truth in truths),
        "mismatch_abs_max_at_exact": max(metrics["mismatch/abs_max"] for metrics in at_exact),
        "mismatch_abs_mean_at_off": fmean(metrics["mismatch/abs_mean"] for metrics in off),
        "between_batches": spread(_between([truth.gradient for truth in truths])),
        **tables,
        "best": best([*tables["corrections"], *tables["bands"]]),
    }
    print(as_text(report))
    write_report(config, "calibrate.json", report)
    return report


def _sample(config: Config, batches: int) -> tuple[LocalTrainer, list[Batch]]:
    """Return a trainer at `exact`, whose engine is closed, and the batches that it sampled."""
    parts = prepare_run(config)
    if parts.policy.align != "exact":
        what = f"this model supports only quant.align={parts.policy.align}, but the reference gradient needs exact"
        why, fix = "; ".join(parts.policy.why_lower), "choose a model and scheme that have it (docs/alignment.md)"
        raise UserError(what, where="model.path, quant.scheme", why=why, fix=fix)
    trainer = LocalTrainer(config, parts)
    with trainer.engine:
        trainer.publish()
        return trainer, [trainer.rollout()[0] for _ in range(batches)]


def _truths(trainer: LocalTrainer, sampled: Sequence[Batch], start: Weights) -> list[Truth]:
    """Return the gradients at `exact` of the batches that have one."""
    base, truths = objective_settings(base_config(trainer.config)), list[Truth]()
    for number, batch in enumerate(sampled, 1):
        say(f"exact: batch {number}")
        old = trainer.old_log_probs(batch)
        gradient = objective_gradients(trainer.policy, trainer.config, batch, old, [base]).by_parameters[0]
        if gradient.any():
            truths.append(Truth(batch, gradient, _moved(trainer, batch, old, base)))
            set_weights(trainer.policy, start)
    if len(truths) < FEWEST_BATCHES:
        raise UserError(
            f"only {len(truths)} of {len(sampled)} batches have a gradient, but at least {FEWEST_BATCHES} are needed",
            where="batches, data.train_batch_size",
            why="all rewards of every group are equal in the others, so every advantage is 0",
            fix="raise batches or data.train_batch_size, or choose a checkpoint that solves some of the prompts",
        )
    return truths


def _compare(
    trainer: LocalTrainer, truths: Sequence[Truth], start: Weights
) -> tuple[list[Row], list[Row], list[dict[str, float]]]:
    """Return the rows of corrections and of bands, and the mismatch of each batch at `off`."""
    config = trainer.config
    trainer.replace_policy(_policy(config, "off", start))
    off = [_mismatch(trainer, truth.batch) for truth in truths]
    olds = [trainer.old_log_probs(truth.batch) for truth in truths]
    ratios = [_log_ratio(truth.batch, old) for truth, old in zip(truths, olds, strict=True)]
    candidates, widths = corrections(config, ratios), bands(config)
    rows, band_rows = ([Row(tried.kind, tried.name, tried.command) for tried in both] for both in (candidates, widths))
    for number, (truth, old) in enumerate(zip(truths, olds, strict=True), 1):
        say(f"off: batch {number} of {len(truths)}")
        _fill(rows, candidates, trainer, truth.batch, old, truth.gradient)
        if truth.moved and widths:
            set_weights(trainer.policy, truth.moved.weights)
            _fill(band_rows, widths, trainer, truth.batch, old, truth.moved.truth, start=truth.moved.start)
            set_weights(trainer.policy, start)
    for level in LEVELS:
        say(f"quant.align={level}")
        trainer.replace_policy(_policy(config, level, start))
        row = Row("alignment", key := f"quant.align={trainer.policy.align}", key)
        for truth in truths:
            old = trainer.old_log_probs(truth.batch)
            _fill([row], candidates[:1], trainer, truth.batch, old, truth.gradient)
        rows.append(row)
    return rows, [row for row in band_rows if row.close], off


def _log_ratio(batch: Batch, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log r_corr, 0 at padding, and the mask of the tokens, [B, R]."""
    return torch.where(batch.response_mask, old - batch.rollout_log_probs, 0.0), batch.response_mask


def _fill(
    rows: Sequence[Row],
    candidates: Sequence[Candidate],
    trainer: LocalTrainer,
    batch: Batch,
    old: torch.Tensor,
    truth: torch.Tensor,
    *,
    start: int = 0,
) -> None:
    """Add one batch to `rows`: the gradients of `candidates` at the trainer's weights over the rows from `start`."""
    settings = [tried.settings for tried in candidates]
    gradients = objective_gradients(trainer.policy, trainer.config, batch, old, settings, start=start)
    for index, row in enumerate(rows):
        row.close.append(closeness(gradients.by_parameters[index], truth))
        row.silent.append(gradients.silent(index, batch.advantages[start:].cpu()))
        row.clipped.append(clipped_share(settings[index], *_log_ratio(batch, old)))
        row.total = row.total + gradients.by_parameters[index]


def _moved(trainer: LocalTrainer, batch: Batch, old: torch.Tensor, base: Settings) -> Moved | None:
    """Update on the first mini-batch. Return the new weights and the gradient there over the other rows.

    The optimizer starts without moments. With one mini-batch and several epochs, the other rows are all rows. Return
    None if the old policy is never left, or if the other rows have no gradient."""
    actor = trainer.config.actor
    first = actor.ppo_mini_batch_size * trainer.config.rollout.n
    start = first if first < len(batch) else 0
    if not start and actor.ppo_epochs == 1:
        return None
    trainer.replace_policy(trainer.policy)
    trainer.objective, batch.weights = base, None
    trainer.backward(batch, old, 0, min(first, len(batch)))
    trainer.optimizer_step()
    truth = objective_gradients(trainer.policy, trainer.config, batch, old, [base], start=start).by_parameters[0]
    return Moved(copy_weights(trainer.policy), truth, start) if truth.any() else None


def _policy(config: Config, level: str, weights: Weights) -> Policy:
    policy = Policy.load(with_keys(config, {"quant.align": level}))
    set_weights(policy, weights)
    return policy


def copy_weights(policy: Policy) -> Weights:
    """Return copies of the weights, with their checkpoint names."""
    return {name: tensor.detach().clone() for name, tensor in forward_weights(policy)}


@torch.no_grad()
def set_weights(policy: Policy, weights: Weights) -> None:
    """Copy `weights` into the policy, and quantize what has changed."""
    for name, tensor in forward_weights(policy):
        tensor.copy_(weights[name])
    policy.requantize()


def _mismatch(trainer: LocalTrainer, batch: Batch) -> dict[str, float]:
    return mismatch_metrics(trainer.old_log_probs(batch), batch.rollout_log_probs, batch.response_mask)


def _between(truths: Sequence[torch.Tensor]) -> list[float]:
    """Return the cosine between each two batches' right gradients: how much a batch of this size says."""
    return [closeness(gradient, other).cosine for i, gradient in enumerate(truths) for other in truths[:i]]


def _reports(rows: Sequence[Row], truth: Any) -> list[dict[str, Any]]:
    if not rows:
        return []
    base = next(row for row in rows if row.kind == "base")
    return [row.report(base, truth) for row in rows]


def best(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the row with the largest mean cosine of each kind, and whether it beats the base beyond the noise.

    It does if its gain passes a one-sided t test over the batches. The best of several candidates gains something by
    chance, so each may be a false finding with a probability of `FALSE_FINDINGS` over their number (Bonferroni)."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] not in ("base", "as configured", "alignment"):
            by_kind.setdefault(row["kind"], []).append(row)
    winners = {kind: max(tried, key=lambda row: row["cosine"]["mean"]) for kind, tried in by_kind.items()}
    return {kind: row | {"beyond_noise": _beyond_noise(row, len(by_kind[kind]))} for kind, row in winners.items()}


def _beyond_noise(row: dict[str, Any], candidates: int) -> bool:
    gain, count = row["cosine_gain"], row["batches"]
    if gain["mean"] <= 0 or gain["std"] == 0:
        return bool(gain["mean"] > 0)
    t = gain["mean"] / gain["std"] * math.sqrt(count)
    return t_tail(t, count - 1) < FALSE_FINDINGS / candidates


def t_tail(t: float, degrees: int) -> float:
    """Return the probability that a value of Student's t distribution is above `t`.

    It is the integral of C cos(a)**(degrees - 1) over the angles a from atan(t / sqrt(degrees)) to a right angle. scipy
    is not a dependency, and torch has no distribution function for it."""
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    first = math.atan(t / math.sqrt(degrees))
    width = (math.pi / 2 - first) / 4000
    return constant * width * sum(math.cos(first + (i + 0.5) * width) ** (degrees - 1) for i in range(4000))


_HEAD = (
    "| tried | cosine | relative error | error of the mean | closer in | responses without gradient | clipped weights |"
)


def as_text(report: Mapping[str, Any]) -> str:
    """Return the printed report."""
    lines = [
        f"\n{report['scheme']}, actor.loss={report['loss']}, {report['model']}: {report['batches']} batches, "
        f"{report['responses']} responses, {report['tokens']} tokens",
        f"mean |δ| at off {report['mismatch_abs_mean_at_off']:.3g}; max |δ| at exact "
        f"{report['mismatch_abs_max_at_exact']:.3g}",
        f"cosine between the exact gradients of two batches: {_shown(report['between_batches'])}",
        *(["the KL term of actor.use_kl_loss is left out"] if report["kl_term_left_out"] else []),
        "\nCorrections of quant.align=off, and alignment instead of a correction, against the gradient of exact:\n",
        *_table(report["corrections"]),
    ]
    if report["bands"]:
        lines += ["\nBands at off, after one update, against exact with the configured bands:\n"]
        lines += _table(report["bands"])
    else:
        lines += ["\nNo bands: the objective has none, or every step has one update."]
    lines += ["", *(_sentence(kind, row) for kind, row in report["best"].items())]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [_HEAD, "|---" * _HEAD.count(" |") + "|"]
    for row in rows:
        cells = [
            row["name"],
            _shown(row["cosine"]),
            _shown(row["relative_error"]),
            f"{row['relative_error_of_the_mean_gradient']:.3f}",
            "" if row["kind"] == "base" else f"{row['closer_in_batches']} of {row['batches']}",
            f"{row['responses_without_gradient']:.1%}",
            f"{row['tokens_with_clipped_weight']:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _sentence(kind: str, row: Mapping[str, Any]) -> str:
    gain, base = row["cosine_gain"], "the configured one" if kind == "band" else "none"
    verdict = f"closer to exact than {base}" if row["beyond_noise"] else f"not closer than {base}, beyond noise"
    return f"best {kind}: {row['keys']} ({verdict}: cosine {gain['mean']:+.5f} ± {gain['std']:.5f})"


def _shown(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.4f} ± {value['std']:.4f}"
