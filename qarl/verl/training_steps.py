"""The training steps of verl's actor: what their forwards are compared with, and which updates are made.

verl generates only inside a training step, so the mismatch cannot be checked before training starts. It is checked in
the first mini-batch, before the first update. If the run is refused, one generation is lost, but nothing was trained.

- The mean |δ| of the mini-batch must be below the limit of `qarl.metrics.mismatch_limit`.
- `check_noise_once` compares |δ| of each rank's first micro-batch with the actor's own rounding noise
  (`qarl.step.noise`). On a CPU the forward gets the arithmetic of level `model` where that exists. It does not for
  experts that are not quantized, because their replacements are made before FSDP2 shards them, and if an engine has
  several workers (`qarl.align.applied_level.split_unavailable`). An actor without the section `quant` is not
  compared: its engine may be quantized by other means, and that mismatch is what TBPO weighs.

`TrainingStep` checks whether a step may use the rollout's log-probs as old log-probs (`actor.old_log_probs`). QaRL's
trainer sets `RELIES` in a batch if its `old_log_probs` are the rollout's. The forwards of the first mini-batch use the
weights that sampled, so they compute the true old log-probs of its rows, which are compared with the rollout's. With
`auto`, if any rank finds a difference, the engine drops the gradients and skips the rest of the update. The trainer
then recomputes the old log-probs and starts the update again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from qarl.errors import UserError
from qarl.quant.experts import QuantExperts, stacked_experts
from qarl.step.noise import TrainedModel, compare_with_noise, has_noise_limit
from qarl.step.statistics import Counts
from qarl.step.updates import RunState, StepUpdates
from qarl.verl.forward import RouterReplay
from qarl.verl.loss import DIFFERING, RELIES
from qarl.verl.step_measurements import StepStatistics, log_prob_rows, summed, temperature_of


@dataclass
class TrainingStep:
    """One training step of the actor on one rank, from its first mini-batch to its last.

    updates      which updates are made, and the comparison before them
    statistics   of all mini-batches until now
    mini_batch   counts of the mini-batch that is trained on, over all ranks
    temperature  the lowest of its rows
    finished     whether its last mini-batch has ended
    """

    updates: StepUpdates = field(default_factory=StepUpdates)
    statistics: StepStatistics = field(default_factory=StepStatistics)
    mini_batch: Counts = field(default_factory=Counts)
    temperature: float = 1.0
    finished: bool = False

    @classmethod
    def of(cls, data: Any) -> TrainingStep:
        """Return the step whose first mini-batch is `data`, one of verl's batches."""
        relies = tu.get(data, key=RELIES, default=None)
        return cls(StepUpdates(None if relies is None else str(relies)))

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
        own = Counts.of(rows["response_mask"], old, rollout)
        self.mini_batch = own.over_ranks(partial(summed, group=group))
        self.temperature = temperature_of(data)
        self.statistics.mini_batches += 1

    def see(self, output: Any, rows: Any, micro_batch: Any) -> None:
        """Use the log-probs of a forward. `rows`: those of `log_prob_rows`."""
        rollout = rows["rollout_log_probs"]
        mask = rows["response_mask"]
        if self.updates.relies is None:
            self.statistics.pairs.add(rows["old_log_probs"], rollout, mask)
        elif self.updates.compares:
            log_probs = no_padding_2_padding(output["model_output"]["log_probs"], micro_batch)
            own = log_probs.detach().float()
            self.updates.compared += Counts.of(mask, own, rollout)
            self.statistics.pairs.add(own, rollout, mask)

    def dropped_outputs(self) -> dict[str, Any]:
        """Return verl's outputs of a mini-batch that makes no update."""
        differing = float(self.updates.compared.differing)
        return {"model_output": {}, "loss": [0.0], "metrics": {DIFFERING: [differing]}}


class ActorSteps:
    """The training steps that this process's actor makes.

    run    what its weights have been through
    step   the step whose mini-batches come now, or that has ended last; None before the first
    asked  whether verl has asked the actor for log-probs since the last step that was not dropped
    """

    def __init__(self) -> None:
        self.run = RunState.LOADED
        self.step: TrainingStep | None = None
        self.asked = False

    @property
    def trained(self) -> bool:
        """Whether this process has begun an update, so that the weights are not the loaded ones."""
        return self.run is RunState.TRAINED

    @property
    def open_step(self) -> TrainingStep | None:
        """The step whose mini-batches come now, or None between steps."""
        return None if self.step is None or self.step.finished else self.step

    @property
    def last_was_dropped(self) -> bool:
        return self.step is not None and self.step.updates.dropped

    def begin(self, data: Any) -> TrainingStep:
        """Return the step that the mini-batch `data` is of."""
        self.step = self.open_step or TrainingStep.of(data)
        return self.step

    def finish(self, step: TrainingStep) -> None:
        step.finished = True
        if not step.updates.dropped:
            self.asked = False


def check_noise_once(
    engine: Any, forward_step: Callable[..., Any], micro_batch: Any, rows: Any
) -> None:
    """Raise MismatchError on every rank if |δ| of the first micro-batches is more than rounding explains.

    Only the first call compares. Nothing is compared without rollout log-probs, at level `exact`, or if
    `mismatch_limit` is set, which replaces this limit. Every rank of the data-parallel group must call this function,
    because it is a collective.

    Args:
        engine: QaRL's engine for verl. Its `steps` note that the comparison has passed.
        forward_step: verl's `forward_step`.
        rows: padded `rollout_log_probs` and `response_mask` of `micro_batch`, each [B, T].
    """
    rollout = rows.get("rollout_log_probs", None)
    if rollout is None or engine.quant is None or engine.steps.run is not RunState.LOADED:
        return
    if not has_noise_limit(engine.limit_level, engine.quant.mismatch_limit):
        return

    def log_probs() -> torch.Tensor:
        _, output = forward_step(micro_batch, None, True)
        return no_padding_2_padding(output["model_output"]["log_probs"], micro_batch).float()

    # so that these forwards do not enter its counts
    routing = engine.routing
    engine.routing = RouterReplay()
    routing.stop()  # it replays the last forward of the pass before, which had other tokens
    try:
        mask = rows["response_mask"].to(get_device_id())
        noise = compare_with_noise(trained_model(engine), log_probs, rollout, mask)
    finally:
        engine.routing.stop()
        engine.routing = routing
    noise.over_ranks(partial(summed, group=engine.get_data_parallel_group())).check()
    engine.steps.run = RunState.PROBED


def trained_model(engine: Any) -> TrainedModel:
    """Return an engine's model as the comparison sees it."""
    experts = stacked_experts(engine.module).values()
    replaced = all(isinstance(stack, QuantExperts) for stack in experts)
    return TrainedModel(
        engine.module,
        engine.scheme,
        engine.ignore,
        align=engine.align,
        limit_level=engine.limit_level,
        kernels=engine.quant.kernels,
        can_be_aligned=replaced and engine.quant.tensor_model_parallel_size == 1,
        dtype=torch.bfloat16,
    )
