"""verl's trainer and actor worker of a small run, without Ray and vLLM: one gloo rank, random prompts and responses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from bad_runs import row
from random_models import save_random_model

from qarl.config import Config, build_config

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
    import pyarrow as pa
    import pyarrow.parquet as pq

    save_random_model(folder / "model")
    for name, first, rows in (("train", 3, 7), ("val", 43, 3)):
        content = [row(" ".join([f"t{first + i}"] * (2 + i % 3))) for i in range(rows)]
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet")


def changed(changes: dict[str, Any]) -> Config:
    """The config `BASE` with dotted keys changed."""
    values: dict[str, Any] = yaml.safe_load(BASE)
    for dotted, value in changes.items():
        section, _, leaf = dotted.partition(".")
        values.setdefault(section, {})[leaf] = value
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

    make: Any = ActorRolloutRefWorker
    worker = make(resolved.actor_rollout_ref, role="actor")
    worker.init_model()
    engine: Any = worker.actor.engine
    engine.compared = True  # the probe would compare made-up log-probs with the model's rounding noise
    return worker


def nested(rows: list[Any]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def first_batch(config: Config) -> tuple[Any, dict[str, Any]]:
    """Keys of a batch of random prompts and responses in TransferQueue's form, and its columns."""
    from transfer_queue import KVBatchMeta

    random = torch.Generator().manual_seed(0)
    count, n = config.data.train_batch_size * config.rollout.n, config.rollout.n
    prompts = [torch.randint(3, 64, (2 + i // n,), generator=random) for i in range(count)]
    responses = [torch.randint(3, 64, (4 + i,), generator=random) for i in range(count)]
    ones = [torch.ones(len(row), dtype=torch.int64) for row in responses]
    rewards = torch.rand(count, generator=random)
    scores = [torch.cat([torch.zeros(len(row) - 1), rewards[i : i + 1]]) for i, row in enumerate(responses)]
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
