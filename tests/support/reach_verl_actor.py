"""verl's actor worker and TransferQueue, with a stand-in for the rollout: real updates on one gloo rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reach_rows import Notes

if TYPE_CHECKING:
    from reach_verl import Verl


class Store:
    """In the place of TransferQueue: the columns of one batch."""

    batch: Any = None

    def __init__(self, **columns: Any) -> None:
        self.columns = columns

    def kv_batch_get(self, *, keys: Any, partition_id: Any, select_fields: list[str]) -> Any:
        from verl.utils import tensordict_utils as tu

        found = {name: self.columns[name] for name in select_fields if name in self.columns}
        return tu.get_tensordict(found, {})

    def kv_batch_put(self, *, keys: Any, partition_id: Any, fields: Any) -> Any:
        self.columns |= {name: fields[name] for name in fields.keys()}  # noqa: SIM118  a TensorDict
        return self.batch

    def kv_clear(self, **which: Any) -> None:
        return None

    async def async_kv_put(self, *arguments: Any, **more: Any) -> None:
        return None


def nested(rows: list[Any]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


@contextlib.contextmanager
def tq_replaced(module: str, store: Store) -> Any:
    """`store` as the module's TransferQueue."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.tq", store)
        yield store


class Actor:
    """verl's actor worker through the training steps of a run: old log-probs, advantages and updates as verl's trainer
    asks for them. The responses are random; `noise` sets the rollout's log-probs apart, up and down in turn."""

    def __init__(self, verl: Verl) -> None:
        from verl.workers.engine_workers import ActorRolloutRefWorker

        self.trainer, self.notes, self.metrics = verl.trainer, Notes(), list[dict[str, Any]]()
        make: Any = ActorRolloutRefWorker
        self.worker = make(verl.resolved.actor_rollout_ref, role="actor")
        self.worker.init_model()
        engine: Any = self.worker.actor.engine
        engine.compared = True  # `noise` would be over the limit that the model's own rounding noise gives
        engine.module.model.layers[0].register_forward_pre_hook(self.notes.forward, with_kwargs=True)
        self.notes.masters.append(self.weights())
        engine.optimizer.register_step_pre_hook(lambda *arguments: self.notes.norms.append(self.norm()))
        engine.optimizer.register_step_post_hook(lambda *arguments: self.notes.masters.append(self.weights()))
        self.trainer.actor_rollout_wg = self
        with tq_replaced("verl.trainer.ppo.v1.trainer_base", self.store(verl.config)) as self.columns:
            for _ in range(verl.config.trainer.total_training_steps):
                self.step(verl.noise)

    def step(self, noise: float) -> None:
        found: dict[str, Any] = {}
        self.trainer._compute_old_log_prob(self.columns.batch, found)
        old = self.columns.columns["old_log_probs"].unbind()
        self.columns.columns["rollout_log_probs"] = nested([row + noise * (-1) ** i for i, row in enumerate(old)])
        self.trainer._compute_advantage(self.columns.batch, found)
        self.advantages = [float(row[0]) for row in self.columns.columns["advantages"].unbind()]
        self.trainer._update_actor(self.columns.batch, found)
        self.metrics.append(found)

    def store(self, config: Any) -> Store:
        from transfer_queue import KVBatchMeta

        random = torch.Generator().manual_seed(0)
        count, n = config.data.train_batch_size * config.rollout.n, config.rollout.n
        prompts = [torch.randint(3, 64, (2 + i // n,), generator=random) for i in range(count)]
        responses = [torch.randint(3, 64, (4 + i,), generator=random) for i in range(count)]
        ones = [torch.ones(len(row), dtype=torch.int64) for row in responses]
        self.rewards = torch.rand(count, generator=random)
        scores = [torch.cat([torch.zeros(len(row) - 1), self.rewards[i : i + 1]]) for i, row in enumerate(responses)]
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
        store = Store(uid=[str(i // n) for i in range(count)], **{key: nested(rows) for key, rows in columns.items()})
        keys = [f"{i // n}_{i % n}_0" for i in range(count)]
        store.batch = KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
        return store

    def compute_log_prob(self, batch: Any) -> Any:
        names = ("input_ids", "prompts", "responses", "position_ids", "response_mask", "loss_mask")
        found = self._call("old_log_prob", self.worker.compute_log_prob, names, batch)
        self.columns.columns |= {"log_probs": found["log_probs"], "entropy": found["entropy"]}
        return batch.keys

    def update_actor(self, batch: Any) -> Any:
        names = [name for name in self.columns.columns if name not in ("uid", "log_probs", "entropy", "rm_scores")]
        return self._call("update", self.worker.update_actor, names, batch)

    def _call(self, phase: str, function: Any, names: Any, batch: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        data = tu.get_tensordict({name: self.columns.columns[name] for name in names}, dict(batch.extra_info))
        self.notes.phase = phase
        found = function(data)
        self.notes.phase = ""
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        named = self.worker.actor.engine.module.named_parameters()
        return {name: parameter.full_tensor().detach().float().clone() for name, parameter in named}

    def norm(self) -> float:
        gradients = [p.grad.full_tensor() for p in self.worker.actor.engine.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))
