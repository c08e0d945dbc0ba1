"""What QaRL's engine for verl measures in a training step: the mismatch, the objective's statistics, samples.

verl averages each metric over mini-batches. An average is wrong for a ratio of counts, such as the share of negative
responses outside their band. So `StepStatistics` collects counts over all mini-batches, micro-batches and ranks, and
computes the metrics once, at the last mini-batch of the step. verl then averages a single number. verl adds the prefix
`actor/` to the metrics, so `mismatch/k3` becomes `actor/mismatch/k3` in verl's loggers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from verl.utils.device import get_device_id

from qarl.metrics.error_tokens import text_metrics, text_statistics
from qarl.metrics.step_metrics import token_mismatch
from qarl.step.samples import SampleLog, SampleRows
from qarl.step.statistics import LogProbPairs, ObjectiveStatistics
from qarl.turns.conversation import spans_of

SAMPLES_IN = "QARL_SAMPLES_IN"
"""The environment variable by which the driver asks for samples. It names the run folder."""

_log = logging.getLogger("qarl.verl")


def summed(values: Sequence[float], group: Any) -> list[float]:
    """Return the sums of `values` over the ranks of `group`, in FP64."""
    sums = torch.tensor(values, dtype=torch.float64)
    if torch.distributed.is_initialized():
        sums = sums.to(get_device_id())
        torch.distributed.all_reduce(sums, group=group)
    return sums.tolist()


def log_prob_rows(batch: Any) -> Any:
    """Return `response_mask`, `rollout_log_probs` and `old_log_probs`, if `batch` has them, each padded to [B, T]."""
    names = [
        name for name in ("rollout_log_probs", "old_log_probs", "response_mask") if name in batch
    ]
    return batch.select(*names).to_padded_tensor()


def temperature_of(data: Any) -> float:
    """Return the lowest temperature of a verl batch. verl gives a number for all rows or a tensor with one per row."""
    value = data.get("temperature", 1.0)
    if isinstance(value, torch.Tensor):
        return float(value.min())
    return float(getattr(value, "data", value))


@dataclass
class StepStatistics:
    """Statistics that one rank has collected since the step began.

    objective     of the objective
    text          of the responses' text
    pairs         the log-probs of actor and rollout
    mini_batches  number of mini-batches that have begun
    """

    objective: ObjectiveStatistics = field(default_factory=ObjectiveStatistics)
    text: list[dict[str, float]] = field(default_factory=list)
    pairs: LogProbPairs = field(default_factory=LogProbPairs)
    mini_batches: int = 0

    @property
    def in_first(self) -> bool:
        """Whether the mini-batch that has begun last is the step's first."""
        return self.mini_batches == 1

    def add_objective(self, values: dict[str, float]) -> None:
        """Add the objective's statistics of one micro-batch."""
        self.objective.add(values, first=self.in_first)

    def add_text(self, micro_batch: Any, *, vocabulary: int) -> None:
        """Add statistics of the text of one micro-batch, if it has what they need. `vocabulary`: number of tokens of
        the tokenizer."""
        names = ("responses", "rollout_log_probs", "advantages", "response_mask")
        if all(name in micro_batch for name in names):
            rows = micro_batch.select(*names).to_padded_tensor()
            self.text.append(
                text_statistics(*(rows[name] for name in names), vocabulary=vocabulary)
            )

    def metrics(self, group: Any = None, routing: tuple[int, int] = (0, 0)) -> dict[str, float]:
        """Return the step's metrics on the first rank of `group`, and {} on the others. All ranks must call it.

        `routing`: numbers of tokens for which the actor's own routers chose different experts than the rollout's, and
        of all tokens for which the rollout's experts are known."""
        mismatch = self._mismatch(group)
        gathered = _gather((self.objective.parts, routing, self.text), group)
        if gathered is None:
            return {}
        objectives, routings, texts = zip(*gathered, strict=True)
        metrics = ObjectiveStatistics(list(chain(*objectives))).metrics()
        metrics |= text_metrics(chain(*texts)) | mismatch
        other, known = (sum(counts) for counts in zip(*routings, strict=True))
        if known:
            metrics["mismatch/other_experts_frac"] = other / known
        return metrics

    def _mismatch(self, group: Any) -> dict[str, float]:
        """Return the mismatch metrics of all ranks' tokens. Each rank sums its own on its device."""
        parallel = torch.distributed.is_initialized()
        device = torch.device(get_device_id()) if parallel else torch.device("cpu")
        old, rollout, lengths = self.pairs.joined(device)

        def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
            if parallel:
                torch.distributed.all_reduce(value, group=group)
            return value

        return token_mismatch(old, rollout, lengths, sum_over_ranks)


def _gather(value: Any, group: Any) -> list[Any] | None:
    """Return `value` of each rank of `group` on its first rank, and None on the others."""
    if not torch.distributed.is_initialized():
        return [value]
    is_first = torch.distributed.get_rank(group) == 0
    ranks = torch.distributed.get_world_size(group)
    gathered: list[Any] | None = [None] * ranks if is_first else None
    torch.distributed.gather_object(value, gathered, group=group, group_dst=0)
    return gathered


def log_mini_batch(engine: Any, data: Any) -> None:
    """Append some responses of the mini-batch `data`, verl's TensorDict, to samples.jsonl, with δ of each token. Errors
    are only logged.

    The first rank writes them, because only the trainer's workers have both δ and the tokens. If the run folder does
    not exist on this machine, nothing is written. `engine`: gives the rank, the tokenizer, and the number of finished
    training steps: the version that was published last, if the trainer has said it, or `lr_scheduler.last_epoch`. A
    step whose updates come one by one is logged once."""
    folder = os.environ.get(SAMPLES_IN)
    if not folder or engine.rank != 0 or not Path(folder).is_dir():
        return
    log = SampleLog(
        Path(folder),
        engine.last_step or getattr(engine.optimizer_config, "total_training_steps", None),
        engine.model_config.tokenizer.decode,
        warn=_log.warning,
    )
    step = (engine.lr_scheduler.last_epoch if engine.version is None else engine.version) + 1
    if step == engine.sampled_step:
        return
    engine.sampled_step = step
    log.write(step, lambda: sample_rows(data), lacking=(KeyError, RuntimeError))


def sample_rows(data: Any) -> SampleRows:
    """Return the rows of a mini-batch. Raise KeyError if it lacks old or rollout log-probs."""

    def column(name: str) -> list[torch.Tensor]:
        return [row.cpu() for row in data[name].unbind()]

    pairs = zip(
        column("response_mask"), column("old_log_probs"), column("rollout_log_probs"), strict=True
    )
    deltas = [
        torch.where(mask != 0, old.float() - rollout.float(), 0.0).tolist()
        for mask, old, rollout in pairs
    ]
    masks = [mask.tolist() for mask in column("response_mask")]
    turns = None if all(map(all, masks)) else [spans_of(mask) for mask in masks]
    rewards = None
    if "rm_scores" in data:
        rewards = [float(row.sum()) for row in column("rm_scores")]
    return SampleRows(
        prompts=column("prompts"),
        responses=column("responses"),
        deltas=deltas,
        advantages=[float(row[:1].sum()) for row in column("advantages")],
        rewards=rewards,
        turns=turns,
    )
