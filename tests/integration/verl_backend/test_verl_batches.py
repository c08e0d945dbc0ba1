"""The check of verl's batch sizes accepts a config exactly if verl's own code, run on it, does not stop."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl_runs import quickstart

pytest.importorskip("verl")

from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.engine_workers import TrainingWorker

from qarl.errors import UserError
from qarl.verl.batch_checks import refuse_partial_batches
from qarl.verl.run import verl_config

pytestmark = pytest.mark.usefixtures("own_environment")

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
SIZES = {
    "data.train_batch_size": (4, 6, 12),
    "actor.ppo_mini_batch_size": (2, 4, 6),
    "rollout.n": (1, 2, 3),
    "trainer.n_gpus_per_node": (1, 2, 4),
    "actor.ppo_micro_batch_size_per_gpu": (1, 3, 4),
    "actor.log_prob_micro_batch_size_per_gpu": (2, 9),
}
VERLS = {
    key: f"actor_rollout_ref.{key}" if key.startswith(("actor", "rollout")) else key
    for key in SIZES
}
VERLS["actor.log_prob_micro_batch_size_per_gpu"] = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"


def refused(composed: DictConfig) -> bool:
    try:
        refuse_partial_batches(composed, set())
    except UserError:
        return True
    return False


def stops(composed: DictConfig, ranks: int) -> bool:
    """Whether one of verl's own assertions ends the first step: of its batches, and nothing else, is it made."""
    actor, rollout = composed.actor_rollout_ref.actor, composed.actor_rollout_ref.rollout
    trainer = SimpleNamespace(config=composed, use_critic=False, global_steps=1)
    multiple = PPOTrainer._get_required_batch_multiple(trainer, ranks)
    responses = composed.data.train_batch_size * rollout.n
    share = (responses + -responses % multiple) // ranks
    worker = stand_in(ranks, actor.ppo_micro_batch_size_per_gpu)
    try:
        micro_batches(batch(share), rollout.log_prob_micro_batch_size_per_gpu)
        update = batch(share)
        tu.assign_non_tensor(update, mini_batch_size=actor.ppo_mini_batch_size * rollout.n)
        TrainingWorker.train_mini_batch(worker, update)
    except AssertionError:
        return True
    return False


def batch(responses: int) -> TensorDict:
    return tu.get_tensordict({"advantages": torch.zeros(responses)}, {})


def micro_batches(data: TensorDict, size: int) -> list[Any]:
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=size)
    return prepare_micro_batches(data)[0]


def stand_in(ranks: int, micro: int) -> Any:
    """For verl's worker of one of `ranks` ranks. Its training on a mini-batch is to cut it into micro-batches."""
    engine = SimpleNamespace(
        get_data_parallel_size=lambda: ranks,
        get_data_parallel_rank=lambda: 0,
        get_data_parallel_group=lambda: None,
        train_mode=lambda **settings: nullcontext(),
        is_mp_src_rank_with_outputs=lambda: False,
    )
    profiler = SimpleNamespace(step=lambda: None)
    return SimpleNamespace(
        engine=engine, profiler=profiler, train_batch=lambda data: micro_batches(data, micro)
    )


def test_the_check_is_verls_own_rule() -> None:
    """Also with mini-batches that do not divide a step, which the section `verl` can set: verl pads the step."""
    composed = verl_config(quickstart(), on_cpu=True)
    answers = []
    for sizes in itertools.product(*SIZES.values()):
        keys = dict(zip(SIZES, sizes, strict=True))
        for key, value in keys.items():
            OmegaConf.update(composed, VERLS[key], value)
        answers.append(refused(composed))
        assert answers[-1] == stops(composed, keys["trainer.n_gpus_per_node"]), keys
    assert min(answers.count(True), answers.count(False)) > len(answers) // 10


LOG_PROBS = "actor.log_prob_micro_batch_size_per_gpu"
MICRO, MINI = "actor.ppo_micro_batch_size_per_gpu", "actor.ppo_mini_batch_size"
REFERENCE = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
GPUS = "trainer.n_gpus_per_node"
KL = {f"{ACTOR}.use_kl_loss": True}
BY_TOKENS = {f"{ACTOR}.use_dynamic_bsz": True}
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
REFERENCE_TOKENS = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"


@pytest.mark.parametrize(
    ("changes", "verls", "key", "parts"),
    [
        ({LOG_PROBS: 36}, {}, LOG_PROBS, ["does not divide a rank's 96 responses", "1 ranks"]),
        ({GPUS: 4}, {}, MICRO, [f"{MICRO}=24", "rank's 12 responses", "a divisor of 12"]),
        ({GPUS: 7}, {}, MINI, ["7 ranks the same number", "data.train_batch_size multiples of 7"]),
        ({LOG_PROBS: 36, MICRO: 16}, {VERLS[MINI]: 8}, LOG_PROBS, ["rank's 128 responses"]),
        ({}, KL | {REFERENCE: 7}, f"verl.{REFERENCE}", ["rank's 96 responses"]),
        ({}, {VERLS[MICRO]: "many"}, f"verl.{VERLS[MICRO]}", ["whole number above 0"]),
        (
            {},
            BY_TOKENS | {TOKENS: 111},
            f"verl.{TOKENS}",
            ["a row of 112 tokens", "to 112 or more"],
        ),
        (
            {},
            BY_TOKENS | KL | {REFERENCE_TOKENS: 100},
            f"verl.{REFERENCE_TOKENS}",
            ["does not hold"],
        ),
    ],
)
def test_a_refusal_names_the_key_as_it_was_written(
    changes: dict[str, int], verls: dict[str, Any], key: str, parts: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        verl_config(quickstart(**changes, verl=verls), on_cpu=True)
    assert caught.value.where == key
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "verls"),
    [
        ({GPUS: 2, "trainer.nnodes": 2, MICRO: 6, LOG_PROBS: 24}, {}),
        ({}, KL | {REFERENCE: 32}),
        ({}, BY_TOKENS | {TOKENS: 112, REFERENCE_TOKENS: 100}),
        (
            {LOG_PROBS: 36},
            {
                "algorithm.rollout_correction.bypass_mode": True,
                f"{ACTOR}.policy_loss.loss_mode": "gspo",
            },
        ),
    ],
)
def test_what_verl_can_split_is_accepted(changes: dict[str, int], verls: dict[str, Any]) -> None:
    assert verl_config(quickstart(**changes, verl=verls), on_cpu=True)
