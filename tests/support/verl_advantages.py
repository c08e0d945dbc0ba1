"""The step of QaRL's trainer for verl that computes advantages, on made-up rows and without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch

KL_FACTOR = 0.1
"""Of the KL term in the rewards, with `use_kl_in_reward`."""


def advantages_in_verl(
    config: Any, rows: dict[str, dict[str, Any]], padding: tuple[str, ...] = (), **keys: Any
) -> list[torch.Tensor]:
    """The advantages of each row, [its tokens]. The arguments are those of `columns_in_verl`."""
    return [row["advantages"] for row in columns_in_verl(config, rows, padding, **keys)]


def columns_in_verl(
    config: Any, rows: dict[str, dict[str, Any]], padding: tuple[str, ...] = (), **keys: Any
) -> list[dict[str, torch.Tensor]]:
    """The columns of each row, [its tokens], after verl has computed advantages. `rows`: verl's key of a row -> its
    columns. `padding`: rows that verl has added. `keys`: of verl's section `algorithm`, in addition to those that
    `config` gives."""
    from omegaconf import OmegaConf
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl_old_log_probs import KeyedStore

    from qarl.verl.config import algorithm_keys, objective_keys

    resolved = OmegaConf.create(
        {"algorithm": {"gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}}
    )
    for key, value in {
        **algorithm_keys(config),
        **objective_keys(config),
        **{f"algorithm.{name}": value for name, value in keys.items()},
    }.items():
        OmegaConf.update(resolved, key.removeprefix("+"), value, force_add=True)
    OmegaConf.update(resolved, "actor_rollout_ref.rollout.n", config.rollout.n)
    trainer: Any = object.__new__(get_trainer_cls("qarl_sync"))
    trainer.config = resolved
    trainer.kl_ctrl_in_reward = FixedKLController(KL_FACTOR)
    names = list(rows)
    columns = {
        column: [row[column] for row in rows.values()] for column in next(iter(rows.values()))
    }
    store = KeyedStore(names, columns)
    tags = [{"is_padding": name in padding} for name in names]
    store.batch = KVBatchMeta(keys=names, tags=tags, partition_id="train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.trainer.ppo.v1.trainer_base.tq", store)
        patch.setattr("qarl.verl.trainer.tq", store)
        trainer._compute_advantage(store.batch, {})
    return [store.rows[name] for name in names]
