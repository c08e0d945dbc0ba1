"""QaRL's trainer for verl with a real actor worker on one gloo rank, without Ray and an engine.

    verl_old_log_probs.py FOLDER OUTPUT

runs every scenario of `SCENARIOS` and saves what each shows. The rollout's log-probs are the actor's own, except for
the rows that a scenario spoils.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from bad_runs import row
from omegaconf import OmegaConf
from random_models import save_random_model

from qarl.config import Config, build_config
from qarl.verl.run import verl_config

STEPS = "trainer.total_training_steps"
BASE = """
name: actor
seed: 3
backend: verl
model: {path: model}
data: {train_files: train.parquet, val_files: val.parquet, train_batch_size: 4, max_prompt_length: 6,
       max_response_length: 8}
rollout: {n: 2}
quant: {scheme: bf16, align: linears}
actor: {ppo_mini_batch_size: 2, ppo_micro_batch_size_per_gpu: 2, log_prob_micro_batch_size_per_gpu: 4}
optim: {lr: 1.0e-2, weight_decay: 0.0}
trainer: {total_training_steps: 1, val_before_train: false, logger: [], plots: false, save_final: false, num_threads: 1}
"""


def make_files(folder: Path) -> None:
    """The model and the prompts that `BASE` names."""
    save_random_model(folder / "model")
    for name, first, rows in (("train", 3, 7), ("val", 43, 3)):
        content = [row(" ".join([f"t{first + i}"] * (2 + i % 3))) for i in range(rows)]
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet")


def changed(changes: dict[str, Any]) -> Config:
    """The config `BASE` with dotted keys changed."""
    values: dict[str, Any] = yaml.safe_load(BASE)
    for dotted, value in changes.items():
        section, _, leaf = dotted.rpartition(".")
        (values.setdefault(section, {}) if section else values)[leaf] = value
    return build_config(values)


def make_trainer(resolved: Any) -> Any:
    """verl's trainer with its tokenizer and data; `global_steps` is 1."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    trainer: Any = object.__new__(get_trainer_cls(resolved.trainer.v1.trainer_mode))
    trainer.config, trainer.trainer_mode, trainer.parameter_sync_step = resolved, "sync", 1
    trainer.use_critic = trainer.use_reference_policy = trainer.use_teacher_policy = False
    trainer.global_steps, trainer.local_trigger_step = 1, 0
    trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **more: None)
    trainer._init_tokenizer()
    trainer._init_dataloader()
    return trainer


def make_worker(resolved: Any) -> Any:
    """verl's actor worker, with the model and optimizer of `resolved`."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from qarl.step.updates import RunState

    make: Any = ActorRolloutRefWorker
    worker = make(resolved.actor_rollout_ref, role="actor")
    worker.init_model()
    engine: Any = worker.actor.engine
    # The probe would compare made-up log-probs with the model's rounding noise.
    engine.steps.run = RunState.PROBED
    return worker


def nested(rows: list[Any]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.as_tensor(row) for row in rows], layout=torch.jagged
    )


def first_batch(config: Config, reward: float | None = None) -> tuple[Any, dict[str, Any]]:
    """Keys of a batch of random prompts and responses in TransferQueue's form, and its columns."""
    from transfer_queue import KVBatchMeta

    random = torch.Generator().manual_seed(0)
    count, n = config.data.train_batch_size * config.rollout.n, config.rollout.n
    prompts = [torch.randint(3, 64, (2 + i // n,), generator=random) for i in range(count)]
    responses = [torch.randint(3, 64, (4 + i,), generator=random) for i in range(count)]
    ones = [torch.ones(len(row), dtype=torch.int64) for row in responses]
    rewards = (
        torch.rand(count, generator=random) if reward is None else torch.full((count,), reward)
    )
    scores = [
        torch.cat([torch.zeros(len(row) - 1), rewards[i : i + 1]])
        for i, row in enumerate(responses)
    ]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    columns = {
        "input_ids": whole,
        "prompts": prompts,
        "responses": responses,
        "position_ids": [torch.arange(len(row)) for row in whole],
        "response_mask": ones,
        "loss_mask": ones,
        "rollout_log_probs": [torch.full((len(row),), -1.0) for row in responses],
        "rm_scores": scores,
    }
    keys = [f"{i // n}_{i % n}_0" for i in range(count)]
    batch = KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
    uid = [str(i // n) for i in range(count)]
    return batch, {"uid": uid} | {name: nested(rows) for name, rows in columns.items()}


AUTO = {"actor.old_log_probs": "auto", "quant.mismatch_limit": 5.0}
ROLLOUT = {"actor.old_log_probs": "rollout", "actor.loss": "grpo"}
COUNT = 5
SCENARIOS: dict[str, dict[str, Any]] = {
    # Eight rows; the first mini-batch has the first four. `spoil`: step -> rows. `reward`: of all rows.
    "recompute": {"keys": {"actor.old_log_probs": "recompute"}},
    "auto": {"keys": AUTO | {"actor.old_log_probs_sample": 0.5}},
    "unchecked": {"keys": AUTO | {"actor.old_log_probs_sample": 0.0}, "spoil": {1: [7]}},
    "all_checked": {"keys": AUTO | {"actor.old_log_probs_sample": 1.0}, "spoil": {1: [7]}},
    "first_mini_batch": {"keys": AUTO | {"actor.old_log_probs_sample": 0.25}, "spoil": {1: [3]}},
    "first_mini_batch_recomputed": {
        "keys": {"actor.old_log_probs": "recompute"},
        "spoil": {1: [3]},
    },
    "one_mini_batch": {"keys": AUTO | {"actor.ppo_mini_batch_size": 4}, "spoil": {1: [6]}},
    "rollout": {"keys": ROLLOUT, "spoil": {1: [0, 7]}},
    "two_epochs": {"keys": AUTO | {"actor.ppo_epochs": 2}},
    # One reward for all: TBPO with groups of three, and whitened rewards.
    "constant": {"keys": {"actor.old_log_probs": "recompute", "rollout.n": 3}, "reward": 0.7},
    "constant_reinforce": {
        "keys": {"actor.old_log_probs": "recompute", "actor.loss": "reinforce"},
        "reward": 0.7,
    },
    "over_the_limit": {"keys": ROLLOUT | {"quant.mismatch_limit": 1e-9}, "spoil": {0: [1]}},
}


class KeyedStore:
    """In the place of TransferQueue: the columns of each row, by key."""

    def __init__(self, keys: list[str], columns: dict[str, Any]) -> None:
        self.rows: dict[str, dict[str, Any]] = {key: {} for key in keys}
        for name, column in columns.items():
            values = column.unbind() if isinstance(column, torch.Tensor) else column
            for key, value in zip(keys, values, strict=True):
                self.rows[key][name] = value
        self.batch: Any = None

    def fields(self, keys: list[str]) -> set[str]:
        """Columns that all rows have: TransferQueue gives no others."""
        return set.intersection(*(set(self.rows[key]) for key in keys))

    def kv_batch_get(self, *, keys: list[str], partition_id: Any, select_fields: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        columns = {}
        for name in [name for name in select_fields if name in self.fields(keys)]:
            values = [self.rows[key][name] for key in keys]
            columns[name] = nested(values) if isinstance(values[0], torch.Tensor) else values
        return tu.get_tensordict(columns, {})

    def kv_batch_put(self, *, keys: list[str], partition_id: Any, fields: Any) -> Any:
        for name in fields.keys():  # noqa: SIM118  a TensorDict
            for key, value in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = value.clone()
        return self.batch


class Planted:
    """A run with verl's actor worker. `spoil`: step -> rows whose first rollout log-prob is one FP32 number off.
    `reward`: of all rows; None: random rewards."""

    def __init__(
        self, config: Config, spoil: dict[int, list[int]], reward: float | None = None
    ) -> None:
        resolved = verl_config(config, on_cpu=True)
        OmegaConf.resolve(resolved)
        self.spoil, self.number, self.passes = spoil, 0, list[int]()
        self.weights_at_pass: list[torch.Tensor] = []
        self.lrs: list[int] = []
        self.metrics: list[dict[str, Any]] = []
        self.trainer, self.worker = make_trainer(resolved), make_worker(resolved)
        self.trainer.actor_rollout_wg = self
        self.first_weights = self.flat()
        batch, columns = first_batch(config, reward)
        self.columns = KeyedStore(batch.keys, columns)
        self.columns.batch = batch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("verl.trainer.ppo.v1.trainer_base.tq", self.columns)
            patch.setattr("qarl.verl.trainer.tq", self.columns)
            for _ in range(config.trainer.total_training_steps):
                self.step()

    def step(self) -> None:
        from verl.workers.utils.padding import response_from_nested

        batch = self.columns.batch
        batch.extra_info = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
        own = self._run(self.worker.compute_log_prob, batch)["log_probs"]
        mask = nested([self.columns.rows[key]["response_mask"] for key in batch.keys])
        rows = [row.clone() for row in response_from_nested(own, mask).unbind()]
        for spoilt in self.spoil.get(self.number, []):
            rows[spoilt][0] = torch.nextafter(rows[spoilt][0], torch.zeros(()))
        for key, column in zip(batch.keys, rows, strict=True):
            for gone in ("old_log_probs", "log_probs", "entropy"):
                self.columns.rows[key].pop(gone, None)
            self.columns.rows[key]["rollout_log_probs"] = column
        batch.extra_info = {"temperature": 1.0}
        metrics: dict[str, Any] = {}
        trainer = self.trainer
        trainer._compute_old_log_prob(batch, metrics)
        trainer._compute_advantage(batch, metrics)
        trainer._update_actor(batch, metrics)
        self.metrics.append(metrics)
        self.lrs.append(self.worker.actor.engine.lr_scheduler.last_epoch)
        self.number += 1
        trainer.global_steps += 1

    def compute_log_prob(self, batch: Any) -> Any:
        self.passes.append(len(batch))
        self.weights_at_pass.append(self.flat())
        output = self._run(self.worker.compute_log_prob, batch)
        self.columns.kv_batch_put(
            keys=batch.keys, partition_id=None, fields=output.select("log_probs", "entropy")
        )
        return batch.keys

    def update_actor(self, batch: Any) -> Any:
        return self._run(self.worker.update_actor, batch)

    def _run(self, function: Any, batch: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        names = self.columns.fields(batch.keys) - {"uid", "rm_scores", "log_probs", "entropy"}
        data = self.columns.kv_batch_get(
            keys=batch.keys, partition_id=None, select_fields=sorted(names)
        )
        tu.assign_non_tensor(data, **batch.extra_info)
        return function(data)

    def flat(self) -> torch.Tensor:
        parameters = self.worker.actor.engine.module.parameters()
        return torch.cat(
            [parameter.full_tensor().detach().float().flatten() for parameter in parameters]
        )


def shown(name: str) -> dict[str, Any]:
    """What one scenario shows, or the error that ended it."""
    scenario, said = SCENARIOS[name], list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a handler in one line
    logging.getLogger("qarl.verl").addHandler(handler)
    try:
        config = changed({STEPS: COUNT, "optim.lr": 1e-3} | scenario["keys"])
        actor = Planted(config, scenario.get("spoil", {}), scenario.get("reward"))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        logging.getLogger("qarl.verl").removeHandler(handler)
    return {
        "passes": actor.passes,
        "at_pass": [float(weights.double().sum()) for weights in actor.weights_at_pass],
        "first_weights": actor.first_weights,
        "weights": actor.flat(),
        "metrics": actor.metrics,
        "lrs": actor.lrs,
        "counts": [vars(count) for count in counts(actor.trainer)]
        if hasattr(actor.trainer, "_schedule")
        else None,
        "said": [text for text in said if "old_log_probs" in text],
    }


def counts(trainer: Any) -> tuple[Any, Any]:
    """The counts of `auto`, and those of a trainer that resumes from a checkpoint of this one."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from qarl.verl.trainer import QaRLTrainerSync

    other = object.__new__(QaRLTrainerSync)
    other.config, other.global_steps = trainer.config, trainer.global_steps
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name in ("_save_checkpoint", "_load_checkpoint"):
            patch.setattr(PPOTrainerSync, name, lambda self: None)
        patch.setattr(trainer.config.trainer, "default_local_dir", folder)
        QaRLTrainerSync._save_checkpoint(trainer)
        other._load_checkpoint()
    return trainer._schedule.skipping, other._schedule.skipping


def main(folder: Path, output: str) -> None:
    torch.distributed.init_process_group("cpu:gloo")
    make_files(folder)
    os.chdir(folder)
    torch.save({name: shown(name) for name in SCENARIOS}, output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
