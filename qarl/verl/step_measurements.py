"""What QaRL's engine for verl measures in a training step: the mismatch, the objective's statistics, samples.

verl averages each metric over mini-batches. An average is wrong for a ratio of counts, such as the share of negative
responses outside their band. So `StepStatistics` collects counts over all mini-batches, micro-batches and ranks, and
computes the metrics once, at the last mini-batch of the step. verl then averages a single number. verl adds the prefix
`actor/` to the metrics, so `mismatch/k3` becomes `actor/mismatch/k3` in verl's loggers.

verl generates only inside a training step, so the mismatch cannot be checked before training starts. It is checked in
the first mini-batch, before the first update. If the run is refused, one generation is lost, but nothing was trained.

- The mean |δ| of the mini-batch must be below the limit of `qarl.metrics.mismatch_limit`.
- `check_first` compares |δ| with the actor's own rounding noise (`qarl.align.rounding_noise`). It takes three forwards
  without gradients of each rank's first micro-batch, once per start. As in `qarl.trainer.mismatch_watch` the forward
  multiplies by the published tensors and, on a CPU, has the arithmetic of level `model` where that exists, also at
  `linears` and `off`. It does not for experts that are not quantized, because their replacements are made before FSDP2
  shards them, and if an engine has several workers (`qarl.align.levels.split_unavailable`). An actor without the
  section `quant` is not compared: its engine may be quantized by other means, and that mismatch is what TBPO weighs.

`TrainingStep` checks whether a step may use the rollout's log-probs as old log-probs (`actor.old_log_probs`). QaRL's
trainer sets `RELIES` in a batch if its `old_log_probs` are the rollout's. The forwards of the first mini-batch use the
weights that sampled, so they compute the true old log-probs of its rows, which are compared with the rollout's. With
`auto`, if any rank finds a difference, the engine drops the gradients and skips the rest of the update. The trainer
then recomputes the old log-probs and starts the update again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from qarl.align.levels import engine_arithmetic
from qarl.align.rounding_noise import Roots
from qarl.errors import UserError
from qarl.metrics.error_tokens import text_metrics, text_statistics
from qarl.metrics.mismatch_limit import NOISE_LIMITS, check_noise, times_noise
from qarl.metrics.step_metrics import token_mismatch
from qarl.objectives.metrics import after_first_metrics, reduce_metrics
from qarl.quant.convert import published_forward
from qarl.quant.experts import QuantExperts, stacked_experts
from qarl.report.samples import append_samples, chosen_samples, is_logged
from qarl.verl.forward import RouterReplay
from qarl.verl.loss import RELIES

SAMPLES_IN = "QARL_SAMPLES_IN"
"""The environment variable by which the driver asks for samples. It names the run folder."""

_log = logging.getLogger("qarl.verl")


@dataclass
class Counts:
    """Counts of some rows: non-empty `responses`, their unmasked `tokens`, `differing` tokens, whose δ between trainer
    and rollout is not 0, and `delta`, the sum of |δ|."""

    responses: float = 0.0
    tokens: float = 0.0
    differing: float = 0.0
    delta: float = 0.0

    @classmethod
    def of(cls, mask: torch.Tensor, mine: torch.Tensor, rollout: torch.Tensor) -> Counts:
        """Count rows. `mine`: the trainer's log-probs. All tensors are [B, T], and only `mine` may have a gradient."""
        mask = (mask != 0).to(mine.device)
        rollout = rollout.to(mine.device)
        # Positions without a token may have any value. NaN counts as different, because NaN != 0.
        delta = torch.where(mask, mine.detach().float() - rollout.float(), 0.0).abs()
        sums = [mask.any(-1).sum(), mask.sum(), (delta != 0).sum(), delta.double().sum()]
        return cls(*torch.stack([value.double() for value in sums]).tolist())

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, astuple(self), astuple(other)))

    def over_ranks(self, group: Any) -> Counts:
        """Return the counts of all ranks of `group`. All must call this, because it is a collective."""
        return Counts(*summed(astuple(self), group))

    @property
    def mismatch(self) -> float:
        """Mean |δ| per token."""
        return self.delta / max(self.tokens, 1.0)

    @property
    def response_length(self) -> float:
        return self.tokens / max(self.responses, 1.0)


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
    return float(value.min() if isinstance(value, torch.Tensor) else getattr(value, "data", value))


@dataclass
class StepStatistics:
    """Statistics that one rank has collected since the step began. `tbpo`: for each mini-batch, the objective's
    statistics of its micro-batches."""

    tbpo: list[list[dict[str, float]]] = field(default_factory=list)
    text: list[dict[str, float]] = field(default_factory=list)
    tokens: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def begin_mini_batch(self) -> int:
        """Begin a mini-batch, and return its number in the step, from 1."""
        self.tbpo.append([])
        return len(self.tbpo)

    def add_text(self, micro_batch: Any, *, vocabulary: int) -> None:
        """Add statistics of the text of one micro-batch, if it has what they need. `vocabulary`: number of tokens of
        the tokenizer."""
        names = ("responses", "rollout_log_probs", "advantages", "response_mask")
        if all(name in micro_batch for name in names):
            rows = micro_batch.select(*names).to_padded_tensor()
            self.text.append(
                text_statistics(*(rows[name] for name in names), vocabulary=vocabulary)
            )

    def add_tokens(
        self, old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Add log-probs and mask of one micro-batch, each [B, T]. Their tokens stay on the device of `old_log_prob`."""
        valid = mask.bool().to(old_log_prob.device)
        rollout = rollout_log_prob.to(old_log_prob.device)
        self.tokens.append((old_log_prob[valid].float(), rollout[valid].float(), valid.sum(-1)))

    @property
    def mean_length(self) -> float:
        """Mean number of tokens in this rank's non-empty responses."""
        lengths = (
            torch.cat([lengths for _, _, lengths in self.tokens]) if self.tokens else torch.zeros(0)
        )
        lengths = lengths[lengths > 0].float()
        return float(lengths.mean()) if len(lengths) else 0.0

    def metrics(self, group: Any = None, routing: tuple[int, int] = (0, 0)) -> dict[str, float]:
        """Return the step's metrics on the first rank of `group`, and {} on the others. All ranks must call it.

        `routing`: numbers of tokens for which the actor's own routers chose different experts than the rollout's, and
        of all tokens for which the rollout's experts are known."""
        mismatch = self._mismatch(group)
        gathered = _gather((self.tbpo, routing, self.text), group)
        if gathered is None:
            return {}
        ranks, routings, texts = zip(*gathered, strict=True)
        everything = [part for rank in ranks for mini_batch in rank for part in mini_batch]
        later = [part for rank in ranks for mini_batch in rank[1:] for part in mini_batch]
        metrics = reduce_metrics(everything) | after_first_metrics(later)
        metrics |= text_metrics(chain(*texts)) | mismatch
        other, known = (sum(counts) for counts in zip(*routings, strict=True))
        if known:
            metrics["mismatch/other_experts_frac"] = other / known
        return metrics

    def _mismatch(self, group: Any) -> dict[str, float]:
        """Return the mismatch metrics of all ranks' tokens. Each rank sums its own on its device."""
        parallel = torch.distributed.is_initialized()
        device = torch.device(get_device_id()) if parallel else torch.device("cpu")
        empty = (torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        old, rollout, lengths = (
            torch.cat(parts).to(device) for parts in zip(*(self.tokens or [empty]), strict=True)
        )

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


@dataclass
class TrainingStep:
    """One training step of the actor on one rank, from its first mini-batch to its last.

    relies       `rollout`, `auto`, or None if the old log-probs were recomputed
    compared     with `relies`, counts of the rows whose true old log-probs were compared with the rollout's: this
                 rank's, and after `close` those of all ranks
    open         whether the weights are still those that sampled; only then forwards are compared
    dropped      whether the update was dropped because of a difference
    skipped      number of updates that were skipped because the gradient was not finite
    statistics   of all mini-batches until now
    mini_batch   counts of the mini-batch that is trained on, over all ranks
    temperature  the lowest of its rows
    """

    relies: str | None = None
    compared: Counts = field(default_factory=Counts)
    open: bool = True
    dropped: bool = False
    skipped: int = 0
    statistics: StepStatistics = field(default_factory=StepStatistics)
    mini_batch: Counts = field(default_factory=Counts)
    temperature: float = 1.0

    @classmethod
    def of(cls, data: Any) -> TrainingStep:
        """Return the step whose first mini-batch is `data`, one of verl's batches."""
        value = tu.get(data, key=RELIES, default=None)
        return cls(None if value is None else str(value))

    def begin_mini_batch(self, data: Any, group: Any) -> None:
        """Count the mini-batch `data`. Every rank of `group` must call this, because it is a collective. Without
        rollout log-probs all tokens differ, and δ is NaN. Raise UserError without `old_log_probs`."""
        rows = log_prob_rows(data)
        if "old_log_probs" not in rows:
            raise UserError(
                "the batch has no old_log_probs, the trainer's own log-probs before the update",
                where="the trainer that calls the actor's train_batch",
                why="QaRL's losses and the check of the mismatch need them, and this trainer did not compute them",
                fix="set trainer.v1.trainer_mode to qarl_sync or sync, or add the column in your own trainer",
            )
        old = rows["old_log_probs"]
        rollout = rows.get("rollout_log_probs", torch.full_like(old, torch.nan))
        self.mini_batch = Counts.of(rows["response_mask"], old, rollout).over_ranks(group)
        self.temperature = temperature_of(data)

    def see(self, output: Any, rows: Any, micro_batch: Any) -> None:
        """Use the log-probs of a forward. `rows`: those of `log_prob_rows`."""
        rollout = rows["rollout_log_probs"]
        mask = rows["response_mask"]
        if self.relies is None:
            self.statistics.add_tokens(rows["old_log_probs"], rollout, mask)
        elif self.open:
            own = (
                no_padding_2_padding(output["model_output"]["log_probs"], micro_batch)
                .detach()
                .float()
            )
            self.compared += Counts.of(mask, own, rollout)
            self.statistics.add_tokens(own, rollout, mask)

    def close(self, group: Any) -> bool:
        """End the comparison, before the first optimizer step. Return whether it was open and compared any token.

        Every rank of `group` must call this method, because it is a collective."""
        compared = self.relies is not None and self.open
        self.open = False
        if compared:
            self.compared = self.compared.over_ranks(group)
            self.dropped = self.relies == "auto" and self.compared.differing > 0
        return compared


def check_first(engine: Any, forward_step: Callable[..., Any], micro_batch: Any, rows: Any) -> None:
    """Raise MismatchError on every rank if |δ| of the first micro-batches is more than rounding explains.

    Only the first call compares. Nothing is compared without rollout log-probs, at level `exact`, or if
    `mismatch_limit` is set, which replaces this limit. Every rank of the data-parallel group must call this function,
    because it is a collective.

    Args:
        engine: QaRL's engine for verl. Its attribute `compared` is set when the comparison has passed.
        forward_step: verl's `forward_step`.
        rows: padded `rollout_log_probs` and `response_mask` of `micro_batch`, each [B, T].
    """
    rollout = rows.get("rollout_log_probs", None)
    level = engine.limit_level
    limited = engine.quant is None or engine.quant.mismatch_limit is not None
    if rollout is None or engine.compared or limited or level not in NOISE_LIMITS:
        return

    def log_probs() -> torch.Tensor:
        _, output = forward_step(micro_batch, None, True)
        return no_padding_2_padding(output["model_output"]["log_probs"], micro_batch).float()

    mask = rows["response_mask"].to(get_device_id())
    roots = Roots()
    # so that these forwards do not enter its counts
    routing = engine.routing
    engine.routing = RouterReplay()
    routing.stop()  # it replays the last forward of the pass before, which had other tokens
    try:
        with ExitStack() as stack:
            alone = engine.quant.tensor_model_parallel_size == 1
            replaced = all(
                isinstance(experts, QuantExperts)
                for experts in stacked_experts(engine.module).values()
            )
            if level in ("off", "linears") and alone and replaced:
                aligned = stack.enter_context(
                    engine_arithmetic(engine.module, dtype=torch.bfloat16)
                )
                level = "model" if aligned else level
            if engine.align == "off" and engine.scheme.quantized:
                stack.enter_context(published_forward(engine.module, engine.scheme, engine.ignore))
            roots.add(engine.module, log_probs, rollout, mask)
    finally:
        engine.routing.stop()
        engine.routing = routing
    delta, noise, tokens = summed(
        [roots.delta, roots.noise, roots.tokens], engine.get_data_parallel_group()
    )
    check_noise(times_noise(delta, noise, tokens), level=level, tokens=tokens)
    engine.compared = True


def log_samples(engine: Any, data: Any) -> None:
    """Append some responses of the mini-batch `data`, verl's TensorDict, to samples.jsonl, with δ of each token. Errors
    are only logged.

    The first rank writes them, because only the trainer's workers have both δ and the tokens. If the run folder does
    not exist on this machine, nothing is written. `engine`: gives the rank, the tokenizer, and the number of finished
    training steps (`lr_scheduler.last_epoch`)."""
    folder = os.environ.get(SAMPLES_IN)
    step = engine.lr_scheduler.last_epoch + 1
    total = getattr(engine.optimizer_config, "total_training_steps", None)
    if not folder or engine.rank != 0 or not is_logged(step, total) or not Path(folder).is_dir():
        return
    try:
        append_samples(folder, samples_of(data, step, engine.model_config.tokenizer.decode))
    except (UserError, OSError, KeyError, RuntimeError) as error:
        _log.warning("the samples of step %d were not written: %s", step, error)


def samples_of(data: Any, step: int, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Return the samples of a mini-batch. Raise KeyError if it lacks old or rollout log-probs."""
    names = (
        "prompts",
        "responses",
        "response_mask",
        "old_log_probs",
        "rollout_log_probs",
        "advantages",
    )
    prompts, responses, masks, old, rollout, advantages = (
        [row.cpu() for row in data[name].unbind()] for name in names
    )
    differences = (
        torch.where(m != 0, a.float() - b.float(), 0.0)
        for m, a, b in zip(masks, old, rollout, strict=True)
    )
    deltas = [row.tolist() for row in differences]
    first = [float(row[:1].sum()) for row in advantages]
    scores = (
        {"reward": [float(row.sum()) for row in data["rm_scores"].unbind()]}
        if "rm_scores" in data
        else {}
    )
    return chosen_samples(step, prompts, responses, deltas, first, decode, **scores)
