"""verl's trainer with engines of their own (`separate_async`), which sample while it updates.

QaRL's configs choose it by `trainer.staleness`; `qarl.verl.separate_keys` says what verl counts. What QaRL's
synchronous trainer adds to verl's stands in `qarl.verl.trainer`, and is the same here.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from qarl.errors import UserError
from qarl.progress import live
from qarl.step.old_log_probs import drawn, sample_size
from qarl.verl.keys import SEPARATE_MODE
from qarl.verl.separate_worker import SeparateActorWorker
from qarl.verl.trainer import QaRLTrainer
from qarl.verl.versioned_client import VersionedClient
from qarl.verl.versions import VERSIONS, Runs, VersionStatistics, padded

_log = logging.getLogger("qarl.verl")
_log.setLevel(logging.INFO)


@register_trainer(SEPARATE_MODE)
class QaRLTrainerSeparate(QaRLTrainer, PPOTrainerSeparateAsync):
    """The trainer. Its engines are replicas of vLLM on GPUs that nothing else uses (`hybrid_engine=False`)."""

    MODE = "separate_async"

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping = {
            role: ray.remote(SeparateActorWorker) for role in self.role_worker_mapping
        }

    def _setup(self) -> None:
        # With hybrid_engine=False verl 0.9.1 passes `flush=True` to its logger, which raises if it logs at this level.
        logger = trainer_separate_async.logger
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            super()._setup()
        finally:
            logger.setLevel(level)

    def get_llm_client(self) -> Any:
        return self.standalone_server_manager.get_client(client_cls=VersionedClient)

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self.actor_rollout_wg.set_last_step(self.total_training_steps)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self._versions = VersionStatistics()
        return super().step(metrics, timing_raw)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        with live.phase("comparing with the versions that sampled"):
            self._see_versions(batch)
        return batch

    @property
    def _current(self) -> int:
        """The version of the weights before this step."""
        return int(self.global_steps) - 1

    def _see_versions(self, batch: Any) -> None:
        """Count the ages of the mini-batch's tokens, and compare a sample of its rows with the weights that sampled
        them."""
        filled = [not tag.get("is_padding", False) for tag in batch.tags]
        keys = [key for key, is_filled in zip(batch.keys, filled, strict=True) if is_filled]
        self._versions.add_rows(self._runs(batch, keys), self._current)
        ranks = self._ranks()
        count = sample_size(len(keys), float(self._setting("old_log_probs_sample")))
        count = min(math.ceil(count / ranks), len(keys) // ranks) * ranks
        if not count:
            return
        seed = (self.config.data.get("seed") or 0) * 1_000_003 + self.global_steps
        rows = drawn(len(keys), count, seed + self.local_trigger_step).tolist()
        sample = self._for_log_probs(batch, [keys[row] for row in rows], count // ranks)
        self._compare(sample)

    def _compare(self, sample: Any) -> None:
        """Compute the log-probs of the rows of `sample` with each version that has sampled a token of them."""
        runs = self._runs(sample, sample.keys)
        old, rollout, mask = self._columns(sample, "old_log_probs")
        versions = padded(runs, mask.shape[1])
        for version in versions[mask].unique().tolist():
            if not all(self.actor_rollout_wg.use_version(version)):
                continue
            try:
                self.actor_rollout_wg.compute_log_prob(sample)
            finally:
                self.actor_rollout_wg.use_version(None)
            own, _, _ = self._columns(sample, "log_probs")
            of_version = (versions == version) & mask
            self._versions.add_checked(own[of_version], old[of_version], rollout[of_version])

    def _runs(self, batch: Any, keys: list[str]) -> list[Runs]:
        """Return the runs of versions of some rows. Raise UserError if a row has none."""
        data = tq.kv_batch_get(
            keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
        )
        told = list(data["extra_fields"])
        if missing := [key for key, each in zip(keys, told, strict=True) if not each.get(VERSIONS)]:
            raise UserError(
                f"{len(missing)} responses do not say which weights sampled their tokens",
                where=", ".join(missing[:4]),
                why="an agent loop without QaRL's client, or with an empty response, has made them",
                fix="use qarl_single_turn, or another agent loop of QaRL's",
            )
        return [each[VERSIONS] for each in told]

    def _save_checkpoint(self) -> None:
        self._check_run_folder()
        self._saving.queue_folder(self.global_steps)
        super()._save_checkpoint()

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], *more: Any, **named: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, *more, **named)
        seen = self._versions
        metrics |= seen.metrics()
        if not seen.delta:  # nothing was compared, so nobody knows whether it is over the limit
            return
        if seen.over_limit is None:  # a step that is saved computes its metrics twice
            seen.over_limit = self._over_limit(seen)
        metrics["mismatch/over_limit"] = float(seen.over_limit)

    def _over_limit(self, seen: VersionStatistics) -> bool:
        """Return whether the mean |δ| of what was compared is over the limit. Log a warning if so."""
        temperature = float(self.config.actor_rollout_ref.rollout.temperature)
        told = self.actor_rollout_wg.over_limit(seen.mean_delta, seen.mean_length, temperature)
        if told[0] is not None:
            _log.warning("step %d: %s", self.global_steps, told[0])
        return told[0] is not None
