"""`qarl diagnose calibrate`: thresholds for the corrections of a run, measured against the exact reference.

arXiv 2605.14220 (VeXact, section 6) proposes this use of a reference without a mismatch: thresholds of corrections are
ad hoc without one. Batches are sampled as in the first steps of the run, but from the weights in `model.path` without
an update. Then trainers at several levels compute the log-probs of the same responses. At level `exact` they are the
rollout's own (on a CPU, bit for bit), so a correction has nothing to correct there, and whatever a threshold takes at
another level is lost to the mismatch of that level alone.

For each level, `RULES` gives the statistics of r_corr, the ratio of the trainer's probability to the rollout's, that a
correction compares with a threshold (section 4.2 of the paper finds r_corr better than the ratio of an update). The
proposed threshold loses `share` of the responses, or of the tokens (`qarl.diagnose.thresholds`).

TBPO's bands bound the ratio of an update, which has no mismatch if trainer and rollout agree. So they are measured at
`exact`: it takes the mini-batches of each batch as a first training step would, and the ratios of all but the first one
count. The learning rate is optim.lr from the first update on, the optimizer has no moments yet, and each batch starts
from the sampled weights.

This departs from the paper, whose reference is another engine: with the engine's own responses on both sides, no noise
of sampling comes between two levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qarl.checkpoint.storage import write_json
from qarl.config import Config
from qarl.config.level import Level
from qarl.config.objectives import get_objective
from qarl.console import say
from qarl.diagnose.arguments import CalibrateRequest
from qarl.diagnose.calibration_report import as_text
from qarl.diagnose.diagnosis import compare, with_keys
from qarl.diagnose.thresholds import Sample, propose, share_above
from qarl.metrics.step_metrics import SAFETY_BOUND, mismatch_metrics
from qarl.quant.state_dict import requantize
from qarl.tbpo.config import TBPOConfig
from qarl.trainer.batch import Batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import prepare_run

FILE = "calibrate.json"
REFERENCE = max(Level)
LEVELS = tuple(level for level in Level if not level.follows_engine)
"""Levels that are measured besides the run's own and the reference."""
LEAST = 1e-6
"""A threshold of a rejection is above 0, and a weight's is at least 1."""

Statistic = Callable[[Tensor, Tensor], Tensor]
"""log r_corr, FP64 [B, R], 0 outside of the mask, and the mask -> values [B], or [tokens]."""
LogProbs = Sequence[Tensor]
"""Log-probs of each sampled batch, FP32 [B, R]."""
Row = dict[str, Any]
"""The report of one threshold."""


@dataclass(frozen=True)
class Rule:
    """A correction with a threshold. `keys`: the config's keys besides it. `key`: the threshold's. `of`: what is lost.

    `statistic` gives [tokens] if `of` is "tokens". `least`: the smallest allowed threshold. `paper`: that of the paper
    that proposes the correction."""

    name: str
    keys: Mapping[str, Any]
    key: str
    of: str
    statistic: Statistic
    least: float
    paper: float | None = None

    def refused_with(self, loss: str) -> bool:
        """Return whether the config refuses this correction with the objective `loss`."""
        objective = get_objective(loss)
        section, _, key = self.key.partition(".")
        if section == "actor":
            return key not in objective.keys
        if "rollout_correction.rollout_is" in self.keys:
            return objective.weights_mismatch
        return self.of == "tokens" and objective.ratio_of_response


def _k1(log_r: Tensor) -> Tensor:
    return -log_r


def _k3(log_r: Tensor) -> Tensor:
    return log_r.expm1() - log_r


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum(1) / mask.sum(1).clamp(min=1)


def _bounded_exp(log_r: Tensor) -> Tensor:
    return log_r.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def _weight(level: str, statistic: Statistic, paper: float | None = None) -> Rule:
    keys = {"rollout_correction.rollout_is": level}
    of = "tokens" if level == "token" else "responses"
    return Rule(
        f"weight, {level}",
        keys,
        "rollout_correction.rollout_is_threshold",
        of,
        statistic,
        1.0,
        paper,
    )


def _rejection(option: str, statistic: Statistic, paper: float | None = None) -> Rule:
    of = "tokens" if option.startswith("token") else "responses"
    keys = {"rollout_correction.rollout_rs": option}
    return Rule(
        f"rejection, {option}",
        keys,
        "rollout_correction.rollout_rs_threshold",
        of,
        statistic,
        LEAST,
        paper,
    )


# arXiv 2605.14220, equations 6, 8 and 11, and its thresholds (appendix A.4).
_WEIGHTS = (
    _weight("token", lambda log_r, mask: _bounded_exp(log_r)[mask], 2.0),
    _weight("sequence", lambda log_r, mask: _bounded_exp(log_r.sum(1))),
    _weight("geometric", lambda log_r, mask: _bounded_exp(_mean(log_r, mask))),
)
_REJECTIONS = (
    _rejection("token_k3", lambda log_r, mask: _k3(log_r)[mask]),
    _rejection("seq_sum_k1", lambda log_r, mask: _k1(log_r).sum(1), 0.001),
    _rejection("seq_sum_k3", lambda log_r, mask: _k3(log_r).sum(1), 0.001),
    _rejection("seq_mean_k1", lambda log_r, mask: _mean(_k1(log_r), mask)),
    _rejection("seq_mean_k3", lambda log_r, mask: _mean(_k3(log_r), mask)),
    _rejection("seq_max_k3", lambda log_r, mask: _k3(log_r).amax(1)),
)
_CAP = Rule(
    "TBPO's cap C",
    {},
    "actor.seq_tis_imp_ratio_cap",
    "responses",
    # arXiv 2604.07853, section 3.2: w outside of [1/C, C].
    lambda log_r, mask: _bounded_exp(_mean(log_r, mask).abs()),
    1.0,
    TBPOConfig().seq_tis_imp_ratio_cap,
)
RULES = (*_WEIGHTS, *_REJECTIONS, _CAP)


@dataclass(frozen=True)
class Sampled:
    """The sampled batches, and for each of them the number of the prompt of every response, int64 [B]."""

    batches: Sequence[Batch]
    prompts: Sequence[Tensor]

    @property
    def responses(self) -> int:
        present = (batch.response_mask.any(1) for batch in self.batches)
        return sum(int(rows.sum()) for rows in present)

    @property
    def tokens(self) -> int:
        return sum(int(batch.response_mask.sum()) for batch in self.batches)


def numbered_prompts(batches: Sequence[Batch]) -> Sampled:
    """Number the prompts from 0 in the order in which they come. Equal prompts have one number."""
    numbers: dict[tuple[int, ...], int] = {}
    prompts = []
    for batch in batches:
        of_rows = []
        for row, length in zip(batch.input_ids, batch.prompt_lengths, strict=True):
            text = tuple(row[:length].tolist())
            of_rows.append(numbers.setdefault(text, len(numbers)))
        prompts.append(torch.tensor(of_rows))
    return Sampled(batches, prompts)


def sample_of(rule: Rule, log_probs: LogProbs, sampled: Sampled) -> Sample:
    """Return the values of `rule` over all batches. `log_probs`: the trainer's."""
    values = []
    prompts = []
    for batch, numbers, trainers in zip(sampled.batches, sampled.prompts, log_probs, strict=True):
        mask = batch.response_mask.cpu()
        rollout = batch.rollout_log_probs.cpu()
        difference = torch.where(mask, trainers.cpu() - rollout, 0.0)
        log_r = difference.double().clamp(-SAFETY_BOUND, SAFETY_BOUND)
        measured = rule.statistic(log_r, mask)
        if rule.of == "tokens":
            prompts.append(numbers[:, None].expand_as(mask)[mask])
            values.append(measured)
        else:
            filled = mask.any(1)
            prompts.append(numbers[filled])
            values.append(measured[filled])
    return Sample(torch.cat(values).numpy(), torch.cat(prompts).numpy())


def threshold_row(
    rule: Rule, sample: Sample, reference: Sample, config: Config, share: float
) -> Row:
    """Return the report of one rule: the proposed threshold, or why there is none, and what the paper's loses."""
    row: Row = {"name": rule.name, "of": rule.of}
    row["refused_with_this_loss"] = rule.refused_with(config.actor.loss)
    proposal = propose(sample, share, origin=1.0 if rule.least == 1.0 else 0.0)
    if isinstance(proposal, str):
        row["none"] = proposal
    elif proposal.value < rule.least:
        row["none"] = (
            f"{1 - share:.0%} of the {rule.of} are below {rule.least:g}, the smallest threshold"
        )
    else:
        row["keys"] = dict(rule.keys) | {rule.key: proposal.value}
        row |= proposal.as_dict()
        row["reference_loses"] = share_above(reference, proposal.value).share
    if rule.paper is not None:
        row["paper"] = _cost_of(rule.paper, sample)
    return row


def _cost_of(value: float, sample: Sample) -> dict[str, float]:
    """Return the share that a threshold loses, with its interval."""
    lost = share_above(sample, value)
    return {"value": value, "loses": lost.share, "low": lost.low, "high": lost.high}


@dataclass(frozen=True)
class Update:
    """The ratios of a later mini-batch: r - 1 of each response, its advantage and length, and its prompt, [B] each."""

    deviation: Tensor
    advantage: Tensor
    length: Tensor
    prompts: Tensor


@dataclass(frozen=True)
class Edge:
    """An edge of TBPO's bands. `sign`: of the advantages. `side`: of the ratio 1. `share`: the share outside."""

    key: str
    sign: int
    side: int
    share: float


def _edges(share: float, *, two_sided: bool) -> list[Edge]:
    """Return the edges of the bands. `two_sided`: whether the positive band has a lower edge."""
    half = share / 2
    positive = [Edge("seq_clip_ratio_high", 1, 1, share)]
    if two_sided:
        positive = [
            Edge("seq_clip_ratio_high", 1, 1, half),
            Edge("seq_clip_ratio_low", 1, -1, half),
        ]
    low = Edge("neg_seq_clip_ratio_low", -1, -1, half)
    high = Edge("neg_seq_clip_ratio_high", -1, 1, half)
    return [*positive, low, high]


def band_rows(updates: Sequence[Update], actor: Any, share: float) -> list[Row]:
    """Return a row for each edge of TBPO's bands: the width that leaves `share` of the responses of its sign outside.

    A band with two edges leaves half of the share outside each. With `actor.band_scaling=length`, widths are those at
    `actor.band_reference_length`."""
    deviation = torch.cat([update.deviation for update in updates])
    advantage = torch.cat([update.advantage for update in updates])
    prompts = torch.cat([update.prompts for update in updates])
    if actor.band_scaling == "length":
        length = torch.cat([update.length for update in updates])
        deviation = deviation * (length / actor.band_reference_length).sqrt()
    rows = []
    for edge in _edges(share, two_sided=actor.positive_band == "two_sided"):
        chosen = advantage * edge.sign > 0
        beyond = (edge.side * deviation[chosen]).double()
        sample = Sample(beyond.numpy(), prompts[chosen].numpy())
        proposal = propose(sample, edge.share)
        row: Row = {"name": f"TBPO's {edge.key}"}
        row["of"] = f"responses with A {'>' if edge.sign > 0 else '<'} 0"
        if isinstance(proposal, str):
            row["none"] = proposal
        elif proposal.value < LEAST:
            row["none"] = "the ratios are on the other side of 1"
        else:
            row["keys"] = {f"actor.{edge.key}": proposal.value}
            row |= proposal.as_dict()
        if len(sample.values):
            row["configured"] = _cost_of(getattr(actor, edge.key), sample)
        rows.append(row)
    return rows


def measure_updates(trainer: LocalTrainer, sampled: Sampled, old: LogProbs) -> list[Update]:
    """Take a first training step on each batch, from the sampled weights, and return the ratios after each update."""
    parameters = trainer.policy.model.parameters()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    start = [parameter.detach().clone() for parameter in trained]
    size = trainer.config.actor.ppo_mini_batch_size * trainer.config.rollout.n
    updates = []
    for batch, prompts, before in zip(sampled.batches, sampled.prompts, old, strict=True):
        with torch.no_grad():
            for parameter, value in zip(trained, start, strict=True):
                parameter.copy_(value)
        requantize(trainer.policy.model)
        trainer.replace_policy(trainer.policy)
        parts: list[slice] = []
        for _ in range(trainer.config.actor.ppo_epochs):
            parts += batch.micro_batches(size)
        for number, part in enumerate(parts):
            _, new = trainer.backward(batch, before, part)
            if number:
                updates.append(_ratios(batch, part, new, before, prompts))
            if part is not parts[-1]:
                trainer.optimizer_step()
    return updates


def _ratios(batch: Batch, rows: slice, new: Tensor, old: Tensor, prompts: Tensor) -> Update:
    mask = batch.response_mask[rows]
    filled = mask.any(1).cpu()
    log_r = _mean(torch.where(mask, new - old[rows], 0.0), mask)
    deviation = log_r.double().expm1().cpu()
    advantages = batch.advantages[rows].cpu()
    lengths = mask.sum(1).cpu()
    return Update(
        deviation=deviation[filled],
        advantage=advantages[filled],
        length=lengths[filled],
        prompts=prompts[rows][filled],
    )


def run(config: Config, request: CalibrateRequest) -> dict[str, Any]:
    """Sample, compare, print, and write `calibrate.json` to the run directory. Return its content."""
    config = with_keys(config, {"optim.lr_warmup_steps": 0})
    parts = prepare_run(config)
    trainer = LocalTrainer(config, parts)
    with trainer.engine:
        numbers = range(request.batches)
        batches = [_sample(trainer, number, request.batches) for number in numbers]
    sampled = numbered_prompts(batches)
    levels = dict.fromkeys((config.quant.align, *LEVELS))
    others = [level for level in levels if level != REFERENCE]
    log_probs = {level: _log_probs(trainer, level, sampled) for level in (*others, REFERENCE)}
    report: dict[str, Any] = {
        "model": config.model.path,
        "scheme": config.quant.scheme,
        "loss": config.actor.loss,
        "level": config.quant.align,
        "batches": request.batches,
        "prompts": len(torch.cat([*sampled.prompts]).unique()),
        "responses": sampled.responses,
        "tokens": sampled.tokens,
        "share": request.share,
    }
    report["levels"] = {
        level: _level(trainers, log_probs[REFERENCE], sampled, config, request.share)
        for level, trainers in log_probs.items()
    }
    report["bands"] = _bands(trainer, sampled, log_probs[REFERENCE], request.share)
    print(as_text(report))
    write_json(config.run_dir / FILE, report)
    return report


def _sample(trainer: LocalTrainer, number: int, batches: int) -> Batch:
    """Sample the batch of step `number`, from weights that no step has changed."""
    say(f"sampling: batch {number + 1} of {batches}")
    trainer.step = number
    trainer.publish()
    return trainer.rollout()[0]


def _log_probs(trainer: LocalTrainer, level: Level, sampled: Sampled) -> list[Tensor]:
    """Return the log-probs of each batch at `level`. Afterwards the trainer's policy is the one of the last level."""
    say(f"quant.align={level}")
    config = trainer.config
    if level != trainer.policy.align:
        trainer.replace_policy(Policy.load(with_keys(config, {"quant.align": level})))
    return [compare(level, trainer.policy, batch, config).log_probs for batch in sampled.batches]


def _level(
    trainers: LogProbs,
    reference: LogProbs,
    sampled: Sampled,
    config: Config,
    share: float,
) -> dict[str, Any]:
    """Return the report of one level. `trainers`, `reference`: log-probs at this level, and at the reference."""
    old = _of_tokens(trainers, sampled)
    rollout = _of_tokens([batch.rollout_log_probs for batch in sampled.batches], sampled)
    metrics = mismatch_metrics(old[None], rollout[None], torch.ones(1, len(old)))
    names = ("abs_mean", "abs_max", "k1", "k3")
    mismatch = {name: metrics[f"mismatch/{name}"] for name in names}
    rows = []
    for rule in RULES:
        sample = sample_of(rule, trainers, sampled)
        without_mismatch = sample_of(rule, reference, sampled)
        rows.append(threshold_row(rule, sample, without_mismatch, config, share))
    return {"mismatch": mismatch, "thresholds": rows}


def _of_tokens(log_probs: LogProbs, sampled: Sampled) -> Tensor:
    """Return the log-probs of the tokens of all batches, FP32 [tokens]."""
    parts = zip(log_probs, sampled.batches, strict=True)
    return torch.cat([part[batch.response_mask].cpu() for part, batch in parts])


def _bands(trainer: LocalTrainer, sampled: Sampled, old: LogProbs, share: float) -> list[Row] | str:
    """Return the rows of the bands, or a sentence that says why there are none. The trainer is at the reference."""
    actor = trainer.config.actor
    if actor.loss != "tbpo":
        return "not measured: actor.loss is not tbpo"
    one_mini_batch = actor.ppo_mini_batch_size >= trainer.config.data.train_batch_size
    if one_mini_batch and actor.ppo_epochs == 1:
        return "not measured: each step has one update, before which every ratio is 1"
    say("updates at the reference")
    return band_rows(measure_updates(trainer, sampled, old), actor, share)
