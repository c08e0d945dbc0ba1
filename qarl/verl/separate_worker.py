"""verl's actor worker for a trainer with engines of its own (`DetachActorWorker`), with what versions need.

verl's trainer saves the weights with which a step begins, and restores them to compute the old log-probs of the step's
later mini-batches (verl 0.9.1, trainer_separate_async.py). On a CPU its copy is no copy: `Tensor.cpu` returns the
parameter's own memory, which the next update changes (`fsdp2_sharded_save_to_cpu`). So this worker copies.

It also keeps what it has published last, so that the trainer can compare an answer with the weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name

from qarl.quant.kept_versions import KeptVersions
from qarl.step.limit import StepLimit
from qarl.verl.versions import versions_to_keep

_Dispatch: Any = Dispatch  # verl adds its members at run time


class SeparateActorWorker(DetachActorWorker):
    """The worker. `actor.engine` is QaRL's engine (`qarl.verl.fsdp_engine`)."""

    actor: Any

    @property
    def copy_handler(self) -> Callable[[Any], Any]:
        """verl's function that saves a module's weights. What it returns shares no memory with them."""
        save: Callable[[Any], Any] = super().copy_handler
        if get_device_name() != "cpu":
            return save

        def copied(module: Any) -> Any:
            states, spec = save(module)
            return {name: (tensor.clone(), of) for name, (tensor, of) in states.items()}, spec

        return copied

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Publish the weights as version `global_steps`, the step that has made them."""
        self.actor.engine.version = global_steps
        metrics = await super().update_weights(global_steps=global_steps, mode=mode)
        if global_steps is not None:
            self._versions.keep(global_steps)
        return metrics

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL)
    def set_last_step(self, step: int) -> None:
        """Say the run's last training step. verl tells the optimizer only the number of updates."""
        self.actor.engine.last_step = step

    @cached_property
    def _versions(self) -> KeptVersions:
        engine = self.actor.engine
        return KeptVersions(engine.module, most=versions_to_keep(engine.quant.staleness))

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL)
    def use_version(self, version: int | None) -> bool:
        """Compute log-probs with the weights that were published as `version`, or with None with the actor's own.
        Return False, and change nothing, if they are not kept: so it is after a resume."""
        if version is not None and version not in self._versions:
            return False
        self._versions.use(version)
        return True

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL)
    def over_limit(self, abs_mean: float, response_length: float, temperature: float) -> str | None:
        """Return a warning if the mean |δ| to the versions that sampled is over the limit, and otherwise None."""
        engine = self.actor.engine
        limit = StepLimit(engine.quant.mismatch_limit, engine.limit_level)
        return limit.check(
            abs_mean,
            response_length=response_length,
            temperature=temperature,
            before_first_update=False,
        )
