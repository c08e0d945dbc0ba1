"""QaRL's trainer with engines of their own, with a real actor worker on one gloo rank, without Ray and an engine.

    verl_stale_steps.py FOLDER OUTPUT

In the place of the engine, each "publish" computes the log-probs of all rows with the actor's weights. A step's rows
are of several versions, and their rollout log-probs are those of these versions, token by token.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl_old_log_probs import KeyedStore, changed, first_batch, make_files, make_trainer, nested

from qarl.step.updates import RunState
from qarl.verl.run import verl_config
from qarl.verl.separate_worker import SeparateActorWorker
from qarl.verl.versions import VERSIONS, VersionStatistics, expanded, run_lengths

STEPS = 4
KEYS = {
    "trainer.staleness": 2,
    "trainer.total_training_steps": STEPS,
    "actor.old_log_probs_sample": 1.0,
    "actor.log_prob_micro_batch_size_per_gpu": 2,
    "quant.scheme": "w4a16",
    "quant.group_size": 32,
    "quant.align": "model",
    "quant.mismatch_limit": 100.0,
    "optim.lr": 1e-2,
}
SPOILT = (3, 1)
"""A step, and a row whose first rollout log-prob is one FP32 number off in it."""


class Store(KeyedStore):
    """Returns the rows that were put, as TransferQueue does."""

    def kv_batch_put(self, *, keys: list[str], partition_id: Any, fields: Any) -> Any:
        super().kv_batch_put(keys=keys, partition_id=partition_id, fields=fields)
        return self.batch.select_keys(keys)


class StaleSteps:
    """A run of `STEPS` steps, each with two mini-batches."""

    def __init__(self) -> None:
        config = changed(KEYS)
        resolved = verl_config(config, on_cpu=True)
        OmegaConf.resolve(resolved)
        self.trainer = make_trainer(resolved)
        self.trainer.trainer_mode = "separate_async"
        self.trainer.parameter_sync_step = 2
        make: Any = SeparateActorWorker
        self.worker = make(resolved.actor_rollout_ref, role="actor")
        self.worker.init_model()
        self.worker.actor.engine.steps.run = RunState.PROBED
        self.trainer.actor_rollout_wg = self
        batch, columns = first_batch(config)
        self.store = Store(batch.keys, columns)
        self.store.batch = batch
        self.of_version: list[dict[str, torch.Tensor]] = []
        self.report: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            for module in ("verl.trainer.ppo.v1.trainer_base", "qarl.verl.trainer"):
                patch.setattr(f"{module}.tq", self.store)
            patch.setattr("qarl.verl.separate_trainer.tq", self.store)
            for step in range(1, STEPS + 1):
                self.publish(step - 1)
                self.step(step)

    def publish(self, version: int) -> None:
        """Keep the weights as `version`, and compute what an engine with them would say of all rows."""
        self.of_version.append(self.log_probs(self.store.batch.keys))
        self.worker._versions.keep(version)

    def log_probs(self, keys: list[str]) -> dict[str, torch.Tensor]:
        """The actor's log-probs of responses, by key."""
        from verl.workers.utils.padding import response_from_nested

        batch = self.store.batch.select_keys(keys)
        batch.extra_info = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
        own = self._run(self.worker.compute_log_prob, batch)["log_probs"]
        mask = nested([self.store.rows[key]["response_mask"] for key in keys])
        rows = response_from_nested(own, mask).unbind()
        return {key: row.clone() for key, row in zip(keys, rows, strict=True)}

    def step(self, number: int) -> None:
        trainer = self.trainer
        trainer.global_steps = number
        trainer._versions = VersionStatistics()
        current = number - 1
        keys = self.store.batch.keys
        for index, key in enumerate(keys):
            self.sample(key, index, current)
        if number == SPOILT[0]:
            row = self.store.rows[keys[SPOILT[1]]]["rollout_log_probs"]
            row[0] = torch.nextafter(row[0], torch.zeros(()))
        for trigger, half in enumerate((keys[:4], keys[4:])):
            trainer.local_trigger_step = trigger
            batch = self.store.batch.select_keys(half)
            batch.extra_info = {"temperature": 1.0}
            metrics: dict[str, Any] = {}
            trainer._compute_old_log_prob(batch, metrics)
            trainer._compute_advantage(batch, metrics)
            trainer._update_actor(batch, metrics)
        old = {key: self.store.rows[key]["old_log_probs"] for key in keys}
        self.report.append(
            {
                "metrics": trainer._versions.metrics(),
                "old": [torch.equal(old[key], self.of_version[current][key]) for key in keys],
                "moved": [
                    not torch.equal(row, self.of_version[current][key])
                    for key, row in self.log_probs(keys).items()
                ],
                "ages": [current - v for key in keys for v in self.versions(key)],
                "ratios": self.ratios(keys, current),
            }
        )

    def versions(self, key: str) -> list[int]:
        return expanded(self.store.rows[key]["extra_fields"][VERSIONS])

    def sample(self, key: str, index: int, current: int) -> None:
        """Give a row its versions and their log-probs: every third row is of two versions."""
        row = self.store.rows[key]
        for gone in ("old_log_probs", "log_probs", "entropy"):
            row.pop(gone, None)
        length = len(row["response_mask"])
        newest = max(0, current - index % 3)
        oldest = max(0, current - 2)
        first = length // 2 if index % 3 == 0 else 0
        tokens = [oldest] * first + [newest] * (length - first)
        row["extra_fields"] = {VERSIONS: run_lengths(tokens)}
        row["rollout_log_probs"] = torch.stack(
            [self.of_version[version][key][at] for at, version in enumerate(tokens)]
        )

    def ratios(self, keys: list[str], current: int) -> torch.Tensor:
        """Log ratio of the policy before the step to that of each token's version."""
        return torch.cat(
            [
                torch.stack(
                    [
                        self.of_version[current][key][at] - self.of_version[version][key][at]
                        for at, version in enumerate(self.versions(key))
                    ]
                )
                for key in keys
            ]
        ).double()

    def compute_log_prob(self, batch: Any) -> Any:
        output = self._run(self.worker.compute_log_prob, batch)
        self.store.kv_batch_put(
            keys=batch.keys, partition_id=None, fields=output.select("log_probs", "entropy")
        )
        return batch

    def update_actor(self, batch: Any) -> Any:
        return self._run(self.worker.update_actor, batch)

    def use_version(self, version: int | None) -> list[bool]:
        """One answer for each rank."""
        return [self.worker.use_version(version)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def _run(self, function: Any, batch: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        hidden = {"uid", "rm_scores", "log_probs", "entropy", "extra_fields"}
        names = self.store.fields(batch.keys) - hidden
        data = self.store.kv_batch_get(
            keys=batch.keys, partition_id=None, select_fields=sorted(names)
        )
        tu.assign_non_tensor(data, **batch.extra_info)
        return function(data)


def main(folder: Path, output: str) -> None:
    torch.distributed.init_process_group("cpu:gloo")
    make_files(folder)
    os.chdir(folder)
    torch.save(StaleSteps().report, output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
